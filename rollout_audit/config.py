"""Settings: what to compute and with which thresholds, and how verl's config and the command line spell them.

Words and defaults are those of verl 0.9.1, verl/trainer/config/algorithm.py (RolloutCorrectionConfig) and
verl/trainer/ppo/rollout_corr_helper.py. No torch here: the command line reads this file before it decides to load it.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field
from typing import Any

from rollout_audit.errors import SettingError

LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
SUPPORTED_ROLLOUT_RS_OPTIONS = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)


@dataclass(frozen=True)
class RejectionRule:
    """One rejection rule: a statistic and the band in which a token or sequence is kept.

    k1 is rollout - train, so its bounds are of rollout / train, compared in log space (`low`, `high`): "0.5_1.25"
    keeps train / rollout from 0.8 to 2. k2 and k3 have an upper bound only.
    """

    option: str
    lower: float | None
    upper: float

    @property
    def level(self) -> str:
        return self.option.rsplit("_", 1)[0]

    @property
    def estimator(self) -> str:
        return self.option.rsplit("_", 1)[1]

    @property
    def low(self) -> float | None:
        return None if self.lower is None else math.log(self.lower)

    @property
    def high(self) -> float:
        return self.upper if self.lower is None else math.log(self.upper)

    @property
    def band(self) -> tuple[float, float]:
        """The band as verl's metrics take it: from 0 where there is no lower bound."""
        return (0.0 if self.low is None else self.low), self.high


@dataclass(frozen=True)
class Settings:
    """Everything that changes a number, as the user gave it and as it is computed with."""

    rollout_is: str | None = "token"
    rollout_is_threshold: str | float | None = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: str | float | None = None
    verl_before_6806: bool = False
    preset: str | None = None
    top: int = 10
    bounds: tuple[float, float | None] = field(init=False, default=(math.inf, None))
    rules: tuple[RejectionRule, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        if self.rollout_is is not None:
            if self.rollout_is not in ("token", "sequence"):
                raise SettingError(f"Invalid rollout_is: {self.rollout_is}. Must be one of {{'token', 'sequence'}}.")
            object.__setattr__(self, "bounds", parse_is_threshold(self.rollout_is_threshold))
        elif self.rollout_is_threshold is not None:
            parse_is_threshold(self.rollout_is_threshold)  # not used, but a wrong one is a mistake all the same
        if self.rollout_rs is not None:
            object.__setattr__(self, "rules", parse_rules(self.rollout_rs, self.rollout_rs_threshold))

    @property
    def upper(self) -> float:
        return self.bounds[0]

    @property
    def lower(self) -> float | None:
        """IcePop's lower bound; None for truncation."""
        return self.bounds[1]

    @property
    def lower_for_fraction(self) -> float:
        """Below this a weight counts as low: the lower bound, else 1 / upper."""
        return 1.0 / self.upper if self.lower is None else self.lower

    def as_dict(self) -> dict[str, Any]:
        """As spelled in verl's config, for the report."""
        names = (
            "preset",
            "rollout_is",
            "rollout_is_threshold",
            "rollout_is_batch_normalize",
            "rollout_rs",
            "rollout_rs_threshold",
            "verl_before_6806",
        )
        return {name: getattr(self, name) for name in names}


def _number(text: str | float, spec: object, what: str) -> float:
    try:
        if isinstance(text, str) and "_" in text:
            raise ValueError  # Python reads "1_5" as 15; here an underscore separates two bounds
        value = float(text)
    except ValueError as exc:
        raise SettingError(f"Invalid {what} '{spec}'.") from exc
    if math.isnan(value):
        raise SettingError(f"Invalid {what} '{spec}': not a number.")
    return value


def parse_is_threshold(spec: object) -> tuple[float, float | None]:
    """(upper, lower) of `2.0`, `"2.0"` (truncation: lower is None) or `"0.5_5.0"` (IcePop)."""
    if isinstance(spec, bool):
        raise TypeError("rollout_is_threshold must be a float or a string threshold specification, not a boolean.")
    if not isinstance(spec, (int, float, str)):
        raise TypeError("rollout_is_threshold must be a float or a string threshold specification.")
    text = str(spec).strip()
    if not text:
        raise SettingError("rollout_is_threshold must not be an empty string.")
    lower_text, separator, upper_text = text.partition("_") if "_" in text else ("", "", text)
    upper = _number(upper_text, spec, "rollout_is_threshold")
    lower = _number(lower_text, spec, "rollout_is_threshold") if separator else None
    if upper <= 0:
        raise SettingError(f"rollout_is_threshold upper bound must be positive, got {upper}.")
    if lower is not None and lower <= 0:
        raise SettingError(f"rollout_is_threshold lower bound must be positive, got {lower}.")
    if lower is not None and lower > upper:
        raise SettingError("rollout_is_threshold lower bound must be <= upper bound.")
    return upper, lower


def parse_rules(options: object, thresholds: object) -> tuple[RejectionRule, ...]:
    """Rules of a comma separated list and its thresholds: one for each, or one for all."""
    if not isinstance(options, str):
        raise SettingError("rollout_rs must be a non-empty string (comma separated for multiple options).")
    names = list(dict.fromkeys(name.strip() for name in options.split(",") if name.strip()))
    if not names:
        raise SettingError("rollout_rs must contain at least one valid option.")
    for name in names:
        if name not in SUPPORTED_ROLLOUT_RS_OPTIONS:
            allowed = sorted(SUPPORTED_ROLLOUT_RS_OPTIONS)
            raise SettingError(f"Invalid rollout_rs option: {name}. Must be one of {allowed}.")
    if thresholds is None:
        raise SettingError("rollout_rs_threshold must be provided for rejection sampling.")
    if not isinstance(thresholds, (int, float, str)):
        raise TypeError("rollout_rs_threshold must be a string or numeric value specifying per-option thresholds.")
    specs = [part.strip() for part in str(thresholds).split(",") if part.strip()]
    if not specs:
        raise SettingError("rollout_rs_threshold must contain at least one threshold value.")
    if len(specs) == 1:
        specs *= len(names)
    if len(specs) != len(names):
        raise SettingError(
            f"rollout_rs_threshold expects either one threshold shared by all options or exactly {len(names)} "
            f"thresholds to match the provided rollout_rs options, got {len(specs)}."
        )
    return tuple(_parse_rule(name, spec) for name, spec in zip(names, specs, strict=True))


def _parse_rule(option: str, spec: str) -> RejectionRule:
    what = f"numeric threshold for option '{option}'"
    if not option.endswith("k1"):
        if "_" in spec:
            raise SettingError(
                f"rollout_rs_threshold for option '{option}' must provide a single upper bound without '_'. "
                f"Received '{spec}'."
            )
        upper = _number(spec, spec, what)
        if upper <= 0:
            raise SettingError(f"Threshold for option '{option}' must be positive, got {spec}.")
        return RejectionRule(option, None, upper)
    lower_text, _, upper_text = spec.partition("_") if "_" in spec else ("", "", spec)
    upper = _number(upper_text, spec, what)
    if upper <= 0:
        raise SettingError(f"Thresholds for option '{option}' must be positive, got {spec}.")
    lower = _number(lower_text, spec, what) if "_" in spec else 1.0 / upper
    if "_" not in spec and not (0 < lower < math.inf and upper < math.inf):
        raise SettingError(f"Threshold {spec} for option '{option}' has no reciprocal: give both bounds, LOW_HIGH.")
    if lower <= 0:
        raise SettingError(f"Thresholds for option '{option}' must be positive, got {spec}.")
    if lower > upper:
        raise SettingError(f"Thresholds for option '{option}' must be lower <= upper, got {spec}.")
    return RejectionRule(option, lower, upper)


def _preset(
    rollout_is: str | None = None,
    threshold: str | float = 2.0,
    rs: str | None = None,
    rs_threshold: str | float | None = None,
) -> dict[str, Any]:
    return {
        "rollout_is": rollout_is,
        "rollout_is_threshold": threshold,
        "rollout_rs": rs,
        "rollout_rs_threshold": rs_threshold,
    }


_ICEPOP = "0.5_5.0"
_GEO: dict[str, Any] = {"rs": "seq_mean_k1", "rs_threshold": "0.999_1.001"}
_K3: dict[str, Any] = {"rs": "seq_mean_k3", "rs_threshold": 0.01}

PRESETS: dict[str, dict[str, Any]] = {
    "decoupled_token_is": _preset("token"),
    "decoupled_seq_is": _preset("sequence"),
    "decoupled_token_icepop": _preset("token", _ICEPOP),
    "decoupled_seq_is_rs": _preset("sequence", rs="seq_sum_k1", rs_threshold="0.5_2.0"),
    "decoupled_geo_rs": _preset(**_GEO),
    "decoupled_geo_rs_seq_tis": _preset("sequence", **_GEO),
    "decoupled_geo_rs_token_tis": _preset("token", **_GEO),
    "decoupled_k3_rs": _preset(**_K3),
    "decoupled_k3_rs_seq_tis": _preset("sequence", **_K3),
    "decoupled_k3_rs_token_tis": _preset("token", **_K3),
    "bypass_ppo_clip": _preset(),
    "bypass_ppo_clip_geo_rs": _preset(**_GEO),
    "bypass_ppo_clip_k3_rs": _preset(**_K3),
    "bypass_pg_is": _preset("sequence"),
    "bypass_pg_token_icepop": _preset("token", _ICEPOP),
    "bypass_pg_geo_rs": _preset(**_GEO),
    "bypass_pg_geo_rs_seq_tis": _preset("sequence", **_GEO),
    "bypass_pg_geo_rs_token_tis": _preset("token", **_GEO),
    "disabled": _preset(),
}
"""The named combinations of verl 0.9.1's RolloutCorrectionConfig, with its defaults."""


def choose(preset: str | None, **given: Any) -> Settings:
    """Settings of a preset (or the defaults), with whatever is given beside it; None means not given."""
    if preset is not None and preset not in PRESETS:
        close = difflib.get_close_matches(preset, PRESETS, 3)
        raise SettingError(
            f"no preset '{preset}'",
            wanted=", ".join(PRESETS),
            do=f"did you mean {' or '.join(close)}?" if close else None,
        )
    chosen: dict[str, Any] = dict(PRESETS[preset]) if preset is not None else {}
    chosen |= {name: value for name, value in given.items() if value is not None}
    for name in ("rollout_is", "rollout_rs"):
        if chosen.get(name) == "none":
            chosen[name] = None
    if chosen.get("rollout_rs") is None and given.get("rollout_rs_threshold") is not None:
        raise SettingError("a rollout_rs_threshold without rollout_rs", do="add --rollout-rs OPTION[,OPTION...]")
    return Settings(**chosen, preset=preset)
