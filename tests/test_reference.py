"""Every key of metrics and audited against slow loops (reference.py) and hand sums, through AuditState."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rollout_audit.audit import build_report
from rollout_audit.batch import Batch
from rollout_audit.config import Settings
from rollout_audit.report import Finding, Report
from rollout_audit.state import AuditState
from tests import reference as slow

NAN, INF = math.nan, math.inf
IS, DEBUG = "is-metrics", "debug-compare"


# Running


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """As `audit` has it: a parallel region for a dozen numbers takes milliseconds on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def report_of(fields: dict[str, Tensor], mask: Tensor, command: str = IS, **settings: Any) -> Report:
    state = AuditState(command, Settings(**settings))
    state.update(Batch.from_padded(fields, mask, path="dump"))
    return build_report(state)


def pair(train: Any, rollout: Any, **more: Any) -> dict[str, Tensor]:
    """Canonical fields, float64 unless tensors are given."""
    fields = {"old_log_probs": train, "rollout_log_probs": rollout, **more}
    return {name: x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64) for name, x in fields.items()}


def ones_like(x: Any) -> Tensor:
    return torch.ones(torch.as_tensor(x).shape, dtype=torch.int64)


def codes(report: Report) -> list[str]:
    return [finding.code for finding in report.findings]


def finding(report: Report, code: str) -> Finding:
    (found,) = [one for one in report.findings if one.code == code]
    return found


def reasons(report: Report) -> dict[str, str]:
    """Why each null is null."""
    return {key: note.text for note in report.notes for key in note.about}


# Comparing

K3_MEANS = ("k3_kl", "kl_rollout_train_k3", "inverse_k3", "_k3_mean", "_k3_seq_mean", "_k3_max", "_k3_seq_max")


def tolerance(key: str, want: float) -> tuple[float, float]:
    """Relative and absolute."""
    if key.endswith(K3_MEANS):
        # expm1(d) - d has a relative error of 2 * 2**-52 / d. Not an absolute one: k3 of |d| ~ 1e-6 is itself 5e-13.
        return 1e-8, 1e-22
    if key.startswith("rollout_corr/") and key.endswith("_std") and "_seq_std" not in key:
        # sqrt(E[x²] - E[x]²) as verl computes it, where it is small: its round-off in E[x²] over twice the std.
        return 1e-9, 1e-15 / max(want, 1e-8)
    if "chi2" in key or key.endswith("kl_train_rollout_k3"):
        return 1e-9, 1e-13  # a difference of numbers near 1
    if key.startswith("khat_"):
        return 1e-6, 1e-9  # of a tail that spans 1e-9 the round-off of the log ratios is that much
    return 1e-9, 1e-14 if key.endswith("_std") else 1e-15


def same(key: str, got: float | None, want: float) -> bool:
    if got is None or not math.isfinite(want):
        return got is None and not math.isfinite(want)
    relative, absolute = tolerance(key, want)
    return math.isclose(got, want, rel_tol=relative, abs_tol=absolute)


def assert_same(got: dict[str, Any], want: dict[str, float]) -> None:
    assert set(got) == set(want)
    assert {key: (got[key], want[key]) for key in want if not same(key, got[key], want[key])} == {}


# Cases


@dataclass(frozen=True)
class Case:
    """Settings as the package takes them, and as the reference does."""

    settings: dict[str, Any]
    bounds: slow.Bounds | None = None
    rules: list[slow.Rule] = field(default_factory=list)

    @property
    def by_sequence(self) -> bool:
        return bool(self.settings.get("rollout_is") == "sequence")

    @property
    def flags(self) -> dict[str, bool]:
        return {
            "normalize": self.settings.get("rollout_is_batch_normalize", False),
            "before_6806": self.settings.get("verl_before_6806", False),
        }


def weights_case(level: str, threshold: float | str, bounds: slow.Bounds, **more: bool) -> Case:
    return Case({"rollout_is": level, "rollout_is_threshold": threshold, **more}, bounds)


def rules_case(*rules: slow.Rule, rollout_is: str | None = None, bounds: slow.Bounds | None = None) -> Case:
    specs = [str(rule.upper) if rule.lower is None else f"{rule.lower}_{rule.upper}" for rule in rules]
    options = ",".join(rule.option for rule in rules)
    settings = {"rollout_is": rollout_is, "rollout_rs": options, "rollout_rs_threshold": ",".join(specs)}
    return Case(settings, bounds, list(rules))


Rule, Bounds = slow.Rule, slow.Bounds
WEIGHTS = {
    "token": weights_case("token", 2.0, Bounds(2.0)),
    "sequence": weights_case("sequence", 2.0, Bounds(2.0)),
    "token-low-threshold": weights_case("token", 0.8, Bounds(0.8)),
    "token-icepop": weights_case("token", "0.5_5.0", Bounds(5.0, 0.5)),
    "sequence-icepop": weights_case("sequence", "0.5_5.0", Bounds(5.0, 0.5)),
    "token-normalized": weights_case("token", "1.5", Bounds(1.5), rollout_is_batch_normalize=True),
    "sequence-normalized": weights_case("sequence", 3, Bounds(3.0), rollout_is_batch_normalize=True),
    "token-icepop-normalized": weights_case("token", "0.9_1.1", Bounds(1.1, 0.9), rollout_is_batch_normalize=True),
    "token-before-6806": weights_case("token", 2.0, Bounds(2.0), verl_before_6806=True),
    "sequence-before-6806": weights_case("sequence", 2.0, Bounds(2.0), verl_before_6806=True),
}
RULES = {
    "token_k1": rules_case(Rule("token_k1", 1.6, 0.6)),
    "token_k2": rules_case(Rule("token_k2", 0.02)),
    "token_k3": rules_case(Rule("token_k3", 0.02)),
    "seq_sum_k1": rules_case(Rule("seq_sum_k1", 2.0, 0.5)),
    "seq_sum_k2": rules_case(Rule("seq_sum_k2", 0.3)),
    "seq_sum_k3": rules_case(Rule("seq_sum_k3", 0.3)),
    "seq_mean_k1": rules_case(Rule("seq_mean_k1", 1.05, 0.96)),
    "seq_mean_k2": rules_case(Rule("seq_mean_k2", 0.01)),
    "seq_mean_k3": rules_case(Rule("seq_mean_k3", 0.01)),
    "seq_max_k2": rules_case(Rule("seq_max_k2", 0.05)),
    "seq_max_k3": rules_case(Rule("seq_max_k3", 0.05)),
    "two-rules-and-weights": rules_case(
        Rule("token_k1", 1.2, 0.9), Rule("seq_max_k3", 0.2), rollout_is="token", bounds=Bounds(2.0)
    ),
    "three-rules": rules_case(Rule("seq_mean_k1", 1.1, 0.98), Rule("token_k3", 0.05), Rule("seq_sum_k2", 0.5)),
}
CASES = WEIGHTS | RULES


def expected_metrics(case: Case, train: slow.Rows, rollout: slow.Rows, mask: slow.Mask) -> dict[str, float]:
    d = slow.ratios(train, rollout)
    result: dict[str, float] = {}
    if case.bounds is not None:
        raw = slow.sequence_weights(d) if case.by_sequence else slow.token_weights(d)
        applied = [[case.bounds.apply(u) for u in row] for row in raw]
        logs = slow.log_weights(d) if case.by_sequence else None
        result |= slow.verl_importance(raw, applied, logs, case.bounds, mask, **case.flags)
    if case.rules:
        result |= slow.verl_rejection(d, case.rules, mask)
    result |= slow.verl_offpolicy(train, rollout, mask)
    return {f"rollout_corr/{key}": value for key, value in result.items()}


def expected_audited(case: Case, all_train: slow.Rows, all_rollout: slow.Rows) -> dict[str, float]:
    train, rollout = slow.finite_only(all_train, all_rollout)
    d = slow.ratios(train, rollout)
    result = slow.counts(all_train, all_rollout)
    if case.bounds is not None:
        raw = slow.sequence_weights(d) if case.by_sequence else slow.token_weights(d)
        applied = [[case.bounds.apply(u) for u in row] for row in raw]
        logs = slow.log_weights(d) if case.by_sequence else None
        result |= slow.audited_importance(raw, applied, logs, case.bounds)
    if case.rules:
        result |= slow.audited_rejection(train, rollout, case.rules)
    return result | slow.audited_offpolicy(train, rollout)


# Random batches


@dataclass
class Padded:
    """A padded batch in the dtypes that it was stored in."""

    train: Tensor
    rollout: Tensor
    mask: Tensor

    @property
    def fields(self) -> dict[str, Tensor]:
        return {"old_log_probs": self.train, "rollout_log_probs": self.rollout}

    def rows(self) -> tuple[slow.Rows, slow.Rows]:
        mask = self.mask.tolist()
        return slow.valid(self.train.double().tolist(), mask), slow.valid(self.rollout.double().tolist(), mask)


def lengths(seed: int, width: int, rows: int) -> list[int]:
    """Two full rows among them, one of a single token; the others of any length but 0."""
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = torch.randint(1, width + 1, (rows,), generator=generator).tolist()
    return [width, 1, *drawn[3:], width]


def padded(seed: int, noise: float, bias: float = 0.0, width: int = 13, rows: int = 9) -> Padded:
    """Right padded, ragged; padding holds numbers that would be seen."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -3.0 * torch.rand(rows, width, generator=generator, dtype=torch.float64) - 0.01
    ratio = noise * torch.randn(rows, width, generator=generator, dtype=torch.float64) + bias
    mask = torch.zeros(rows, width, dtype=torch.int64)
    for row, length in enumerate(lengths(seed, width, rows)):
        mask[row, :length] = 1
    return Padded(rollout + ratio, rollout, mask)


def ragged(seed: int) -> Padded:
    return padded(seed, 0.15)


def with_empty_rows(seed: int) -> Padded:
    batch = padded(seed, 0.3)
    batch.mask[[0, 4, 5]] = 0
    return batch


def with_holes(seed: int) -> Padded:
    batch = padded(seed, 0.2)
    batch.mask[0, 3:7] = 0
    batch.mask[8, 0] = 0
    return batch


def left_padded(seed: int) -> Padded:
    batch = padded(seed, 0.2)
    return Padded(batch.train.flip(1), batch.rollout.flip(1), batch.mask.flip(1))


def with_nan_in_padding(seed: int) -> Padded:
    batch = with_empty_rows(seed)
    batch.train[batch.mask == 0], batch.rollout[batch.mask == 0] = NAN, -INF
    return batch


def wide(seed: int) -> Padded:
    return padded(seed, 3.0)


def beyond_the_safety_bound(seed: int) -> Padded:
    batch = padded(seed, 1.0)
    batch.train[0, :4] += torch.tensor([25.0, -30.0, 19.0, -21.0])
    batch.train[8] -= 4.0
    batch.train[2, 0] = batch.rollout[2, 0] + 35.0
    return batch


def beyond_float64(seed: int) -> Padded:
    batch = padded(seed, 0.1)
    batch.rollout[0, 2] -= 800.0
    batch.train[8, 3] -= 900.0
    return batch


def far_apart(seed: int) -> Padded:
    """Every weight is next to 0."""
    return padded(seed, 5.0, bias=-150.0)


def tiny(seed: int) -> Padded:
    return padded(seed, 1e-6)


def tiny_but_for_one(seed: int) -> Padded:
    batch = padded(seed, 1e-6)
    batch.train[0, 0] = batch.rollout[0, 0] + 0.2
    return batch


def drifting(seed: int) -> Padded:
    return padded(seed, 0.02, bias=0.08)


def single_tokens(seed: int) -> Padded:
    return padded(seed, 0.5, width=1, rows=7)


def one_token(seed: int) -> Padded:
    batch = padded(seed, 0.5)
    batch.mask[:] = 0
    batch.mask[3, 2] = 1
    return batch


def one_row(seed: int) -> Padded:
    batch = padded(seed, 0.5, rows=5)
    return Padded(batch.train[:1], batch.rollout[:1], batch.mask[:1])


def identical(seed: int) -> Padded:
    batch = with_empty_rows(seed)
    return Padded(batch.rollout.clone(), batch.rollout, batch.mask)


def in_float32(seed: int) -> Padded:
    batch = padded(seed, 0.1)
    return Padded(batch.train.float(), batch.rollout.float(), batch.mask.float())


def in_bfloat16(seed: int) -> Padded:
    batch = padded(seed, 0.3)
    return Padded(batch.train.bfloat16(), batch.rollout.bfloat16(), batch.mask.bool())


def with_nan_and_inf(seed: int) -> Padded:
    """One of each on valid tokens; one row loses all of its tokens."""
    batch = padded(seed, 0.3)
    batch.train[0, 1], batch.rollout[0, 2], batch.train[8, 0] = NAN, -INF, -INF
    batch.train[1, 0] = NAN
    return batch


def with_inf_only(seed: int) -> Padded:
    """Infinite log ratios are clamped by verl, so most of its numbers stay finite."""
    batch = with_empty_rows(seed)
    batch.train[8, 0] = -INF
    return batch


KINDS: list[Callable[[int], Padded]] = [
    ragged,
    with_empty_rows,
    with_holes,
    left_padded,
    with_nan_in_padding,
    wide,
    beyond_the_safety_bound,
    beyond_float64,
    far_apart,
    tiny,
    tiny_but_for_one,
    drifting,
    single_tokens,
    one_token,
    one_row,
    identical,
    in_float32,
    in_bfloat16,
    with_nan_and_inf,
    with_inf_only,
]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
seeds = pytest.mark.parametrize("seed", [0, 1])


# The comparison


@kinds
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_is_metrics_gives_what_slow_loops_give(case: Case, kind: Callable[[int], Padded]) -> None:
    batch = kind(list(CASES.values()).index(case))
    report = report_of(batch.fields, batch.mask, **case.settings)
    assert_same(report.metrics, expected_metrics(case, *batch.rows(), slow.Mask()))
    assert_same(report.audited, expected_audited(case, *batch.rows()))


@seeds
@kinds
def test_debug_compare_gives_what_slow_loops_give(kind: Callable[[int], Padded], seed: int) -> None:
    batch = kind(seed)
    report = report_of(batch.fields, batch.mask, DEBUG, top=7)
    train, rollout = batch.rows()
    want = slow.verl_debug(train, rollout)
    assert_same(report.metrics, {f"training/{key}": value for key, value in want.items()})
    assert_same(report.audited, slow.counts(train, rollout) | slow.audited_debug(*slow.finite_only(train, rollout)))
    worst = slow.worst_tokens(batch.train.double().tolist(), batch.rollout.double().tolist(), batch.mask.tolist(), 7)
    got = [(token["row"], token["position"], token["log_ratio"]) for token in report.extra["worst_tokens"]]
    assert got == worst


@pytest.mark.parametrize("kind", [ragged, with_empty_rows, with_holes, wide, one_token, with_nan_and_inf])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_float64_mask_keeps_the_guard_in_metrics_and_not_in_audited(
    case: Case, kind: Callable[[int], Padded]
) -> None:
    batch = kind(100 + list(CASES.values()).index(case))
    report = report_of(batch.fields, batch.mask.double(), **case.settings)
    assert_same(report.metrics, expected_metrics(case, *batch.rows(), slow.Mask(float64=True)))
    assert_same(report.audited, expected_audited(case, *batch.rows()))


@seeds
@kinds
def test_denominators_count_what_was_averaged(kind: Callable[[int], Padded], seed: int) -> None:
    batch = kind(seed)
    case = RULES["two-rules-and-weights"]
    report = report_of(batch.fields, batch.mask, **case.settings)
    all_train, all_rollout = batch.rows()
    train, rollout = slow.finite_only(all_train, all_rollout)
    kept = slow.kept_by(slow.ratios(train, rollout), case.rules, slow.Mask())
    tokens = len(slow.flat(all_train))
    sizes = {
        "sequences": len(all_train),
        "sequences with a valid token": len(slow.filled(train)),
        "tokens kept by rejection": sum(sum(row) for row in kept),
        "finite valid tokens": len(slow.flat(train)),
        "valid tokens": tokens,
    }
    assert {key: over["count"] for key, over in report.denominators.items()} == {
        key: sizes[over["of"]] for key, over in report.denominators.items()
    }
    averaged = report.denominators["log_ratio_mean"]
    assert averaged["of"] == ("valid tokens" if len(slow.flat(train)) == tokens else "finite valid tokens")


def large(seed: int) -> Padded:
    """More tokens than are kept one by one."""
    return padded(seed, 0.2, width=900, rows=90)


def test_is_metrics_of_more_tokens_than_a_small_sample_gives_what_slow_loops_give() -> None:
    batch, case = large(0), RULES["two-rules-and-weights"]
    report = report_of(batch.fields, batch.mask, **case.settings)
    train, rollout = batch.rows()
    assert len(slow.flat(train)) > 32_768
    assert_same(report.metrics, expected_metrics(case, train, rollout, slow.Mask()))
    assert_same(report.audited, expected_audited(case, train, rollout))


def test_debug_compare_of_more_tokens_than_a_small_sample_has_quantiles_to_one_in_a_thousand_and_no_ranks() -> None:
    batch = large(1)
    report = report_of(batch.fields, batch.mask, DEBUG)
    train, rollout = batch.rows()
    want = slow.counts(train, rollout) | slow.audited_debug(train, rollout)
    sizes = [abs(d) for d in slow.flat(slow.ratios(train, rollout))]
    for name, q in {"median": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}.items():
        key = f"log_prob_diff_abs_{name}"
        below, above = slow.neighbours(sizes, q)
        got = report.audited.pop(key)
        assert got is not None
        assert 0.999 * below <= got <= 1.001 * above
        del want[key]
    assert_same(report.audited, want)
    assert report.audited["log_prob_spearman"] is None
    assert "32,768" in reasons(report)["audited/log_prob_spearman"]


# The loops themselves, against the real verl


VERL = Path(__file__).parent / "goldens" / "verl"
SMALL = [case for case in json.loads((VERL / "expected.json").read_text())["cases"] if "larger" not in case["dump"]]


def case_of(settings: dict[str, Any]) -> Case:
    """A stored case's settings; a k1 threshold of one number X is the band 1/X to X."""
    bounds = None
    if settings["rollout_is"]:
        *low, high = map(float, str(settings["rollout_is_threshold"]).split("_"))
        bounds = Bounds(high, *low)
    rules = []
    options = settings.get("rollout_rs", "").split(",") if settings.get("rollout_rs") else []
    specs = settings.get("rollout_rs_threshold", "").split(",")
    for option, spec in zip(options, specs * len(options) if len(specs) == 1 else specs, strict=True):
        *low, high = map(float, spec.split("_"))
        rules.append(Rule(option, high, *(low or [1 / high] if option.endswith("k1") else [])))
    return Case(settings, bounds, rules)


@pytest.mark.parametrize("dump", sorted({case["dump"] for case in SMALL}))
def test_the_slow_loops_give_what_verl_gave(dump: str) -> None:
    tensors = load_file(VERL / dump)
    mask = tensors["response_mask"]
    batch = Padded(tensors["old_log_probs"], tensors["rollout_log_probs"], mask)
    for stored in SMALL:
        if stored["dump"] != dump:
            continue
        if stored["command"] == DEBUG:
            got = {f"training/{key}": value for key, value in slow.verl_debug(*batch.rows()).items()}
        else:
            float64 = mask.dtype == torch.float64
            got = expected_metrics(case_of(stored["settings"]), *batch.rows(), slow.Mask(float64))
        want = {key: float(value) for key, value in stored["metrics"].items()}
        assert set(got) == set(want)
        # absolute 1e-7: verl's std of equal values is round-off; 1e-10: its k3 cancels
        wrong = {
            key: (got[key], want[key])
            for key in want
            if not (math.isnan(got[key]) and math.isnan(want[key]))
            and not math.isclose(got[key], want[key], rel_tol=1e-9, abs_tol=1e-7 if key.endswith("std") else 1e-10)
        }
        assert not wrong, stored["settings"]


# Dumped weights, no log-probs


def weights_batch(seed: int, bounds: slow.Bounds, by_sequence: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Applied, raw and mask."""
    batch = with_empty_rows(seed)
    d = batch.train - batch.rollout
    raw = d.exp()
    if by_sequence:
        raw = torch.where(batch.mask == 1, d, 0.0).sum(1, keepdim=True).expand_as(d).exp().clone()
    inside = (raw >= bounds.lower) & (raw <= bounds.upper) if bounds.lower is not None else None
    applied = raw.clamp(max=bounds.upper) if inside is None else torch.where(inside, raw, 0.0)
    return applied, raw, batch.mask


@seeds
@pytest.mark.parametrize("with_raw", [True, False], ids=["with-raw", "applied-only"])
@pytest.mark.parametrize("case", WEIGHTS.values(), ids=WEIGHTS)
def test_a_dump_of_weights_alone_gives_what_slow_loops_give(case: Case, with_raw: bool, seed: int) -> None:
    assert case.bounds is not None
    applied, raw, mask = weights_batch(seed, case.bounds, case.by_sequence)
    applied[0, 0] = 7.5  # above any threshold: dumped with other settings
    fields = {"rollout_is_weights": applied} | ({"raw_rollout_is_weights": raw} if with_raw else {})
    report = report_of(fields, mask, **case.settings)
    v, u = slow.valid(applied.tolist(), mask.tolist()), slow.valid(raw.tolist(), mask.tolist())
    known = u if with_raw else None
    logs = slow.log_weights_of_dumped(u) if case.by_sequence else None
    want = slow.verl_importance(known, v, logs, case.bounds, slow.Mask(), **case.flags)
    nothing = slow.verl_offpolicy([[]], [[]], slow.Mask())
    assert_same(
        report.metrics,
        {f"rollout_corr/{key}": value for key, value in (want | dict.fromkeys(nothing, NAN)).items()},
    )
    assert_same(
        report.audited,
        slow.counts(v)
        | slow.audited_importance(known, v, logs, case.bounds)
        | dict.fromkeys(slow.audited_offpolicy([], []), NAN)
        | (slow.audited_dumped_raw(u) if with_raw else {}),
    )
    assert "rollout_log_probs" in reasons(report)["rollout_corr/kl"]
    if not with_raw:
        assert "raw_rollout_is_weights" in reasons(report)["audited/truncated_token_fraction"]


# Hand sums


def raw_weights(*rows: list[float]) -> dict[str, Tensor]:
    return pair([[math.log(w) - 1 for w in row] for row in rows], [[-1.0] * len(row) for row in rows])


def test_the_high_fraction_of_sequences_comes_from_raw_weights_since_pr_6806() -> None:
    fields = raw_weights([1.0, 6.0], [0.9, 1.1])  # raw means 3.5 and 1; applied ones 1.5 and 1
    report = report_of(fields, torch.ones(2, 2, dtype=torch.int64))
    assert report.metrics["rollout_corr/rollout_is_seq_fraction_high"] == 0.5
    assert report.metrics["rollout_corr/rollout_is_seq_max"] == pytest.approx(1.5)


def test_the_high_fraction_of_sequences_was_dead_before_pr_6806() -> None:
    fields = raw_weights([1.0, 6.0], [0.9, 1.1])
    report = report_of(fields, torch.ones(2, 2, dtype=torch.int64), verl_before_6806=True)
    assert report.metrics["rollout_corr/rollout_is_seq_fraction_high"] == 0.0
    assert report.audited["rollout_is_seq_fraction_high"] == 0.5


@pytest.mark.parametrize(("empty", "verl"), [(0, 1.0), (1, 0.5), (3, 0.25)])
def test_audited_values_do_not_move_with_empty_rows_and_verl_s_do(empty: int, verl: float) -> None:
    mask = torch.tensor([[1], *[[0]] * empty])
    report = report_of(pair([[-2.0]] * (1 + empty), [[-1.0]] * (1 + empty)), mask)
    assert report.audited["log_ppl_abs_diff"] == 1.0
    assert report.audited["training_ppl"] == pytest.approx(math.e**2, rel=1e-15)
    assert report.metrics["rollout_corr/log_ppl_abs_diff"] == verl
    assert report.metrics["rollout_corr/training_ppl"] == pytest.approx((math.e**2 + empty) / (1 + empty), rel=1e-15)
    assert ("empty-rows" in codes(report)) == (empty > 0)


def test_an_empty_row_counts_as_weight_0_for_verl_and_not_at_all_when_audited() -> None:
    report = report_of(pair([[-1.0], [-1.0]], [[-1.0], [-1.0]]), torch.tensor([[1], [0]]))
    name = "rollout_is_seq_{}".format
    metrics = {key.removeprefix("rollout_corr/"): value for key, value in report.metrics.items()}
    assert [metrics[name(key)] for key in ("mean", "min", "max_deviation", "fraction_low")] == [0.5, 0.0, 1.0, 0.5]
    assert [report.audited[name(key)] for key in ("mean", "min", "max_deviation", "fraction_low")] == [1, 1, 0, 0]
    assert metrics["rollout_is_seq_std"] == pytest.approx(math.sqrt(0.5))  # of 1 and 0, divided by B - 1
    assert report.audited["rollout_is_seq_std"] is None
    assert reasons(report)["audited/rollout_is_seq_std"] == "needs two sequences"


def test_kl_k3_and_chi2_of_two_tokens_are_those_of_a_hand_sum() -> None:
    double, half = math.log(2), -math.log(2)  # weights 2 and 1/2
    report = report_of(pair([[double - 1, half - 1]], [[-1.0, -1.0]]), torch.ones(1, 2, dtype=torch.int64))
    metrics, audited = report.metrics, report.audited
    assert metrics["rollout_corr/kl"] == pytest.approx(0.0, abs=1e-16)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(0.25)  # (2 + 1/2) / 2 - 1
    assert audited["inverse_k3"] == pytest.approx(0.25)
    assert audited["kl_rollout_train_k2"] == pytest.approx(math.log(2) ** 2 / 2)
    assert audited["kl_train_rollout_k1"] == pytest.approx(0.75 * math.log(2))  # (2 ln 2 - 1/2 ln 2) / 2
    assert audited["kl_train_rollout_k3"] == pytest.approx(0.75 * math.log(2) - 0.25)
    assert metrics["rollout_corr/chi2_token"] == pytest.approx(1.125)  # (4 + 1/4) / 2 - 1
    assert audited["ess_tokens"] == pytest.approx(2.5**2 / (2 * 4.25))
    assert metrics["rollout_corr/chi2_seq"] == pytest.approx(0.0, abs=1e-15)  # the product of both weights is 1


def test_the_band_of_a_k1_rule_is_of_rollout_over_train() -> None:
    fields = raw_weights([0.5, 1.0, 1.8])  # rollout / train 2, 1, 0.56
    report = report_of(fields, ones_like([[1, 1, 1]]), rollout_rs="token_k1", rollout_rs_threshold="0.5_1.5")
    prefix = "rollout_corr/rollout_rs_token_k1_"
    assert report.metrics[f"{prefix}fraction_high"] == pytest.approx(1 / 3, rel=1e-7)
    assert report.metrics[f"{prefix}fraction_low"] == 0.0
    assert report.metrics[f"{prefix}masked_fraction"] == pytest.approx(1 / 3)
    assert report.audited["after_rejection_raw_weight_min"] == pytest.approx(1.0)


def test_sequence_weights_count_once_a_token_in_the_mean_and_once_a_row_in_the_sequence_mean() -> None:
    fields = pair([[-0.5, -1.0, -1.0], [-1.0, 0.0, 0.0]], [[-1.0, -1.0, -1.0], [-1.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])  # weights e**0.5 over three tokens, 1 over one
    report = report_of(fields, mask, rollout_is="sequence")
    assert report.metrics["rollout_corr/rollout_is_mean"] == pytest.approx((3 * math.sqrt(math.e) + 1) / 4)
    assert report.metrics["rollout_corr/rollout_is_seq_mean"] == pytest.approx((math.sqrt(math.e) + 1) / 2)


def test_probabilities_and_log_probs_of_a_rare_token_differ_as_the_page_says() -> None:
    report = report_of(pair([[-5.0, -1.0]], [[-15.0, -1.0]]), ones_like([[1, 1]]), DEBUG)
    assert report.metrics["training/rollout_probs_diff_max"] == pytest.approx(0.0067, abs=5e-5)
    assert report.audited["log_prob_diff_abs_max"] == 10.0
    assert report.audited["token_mult_prob_error"] == pytest.approx((math.exp(10) + 1) / 2)
    assert report.audited["log_prob_equal_fraction"] == 0.5
    assert report.audited["log_prob_diff_above_ln2_fraction"] == 0.5


# NaN and infinity on valid tokens


SPOILED = pair([[-1.0, NAN, -1.5], [-2.0, -1.0, -0.5]], [[-1.25, -1.0, -1.5], [-2.0, -INF, -1.0]])
CLEAN_D = [0.25, 0.0, 0.0, 0.5]


@pytest.fixture(scope="module")
def spoiled() -> Report:
    return report_of(SPOILED, torch.ones(2, 3, dtype=torch.int64))


def test_nan_makes_verl_s_sums_null_with_a_reason(spoiled: Report) -> None:
    for key in ("kl", "k3_kl", "training_ppl", "rollout_is_mean", "rollout_is_max", "chi2_token"):
        assert spoiled.metrics[f"rollout_corr/{key}"] is None
        assert reasons(spoiled)[f"rollout_corr/{key}"] == "2 valid tokens are NaN or infinite"


def test_audited_values_are_over_the_finite_tokens(spoiled: Report) -> None:
    assert spoiled.audited["log_ratio_mean"] == pytest.approx(sum(CLEAN_D) / 4)
    assert spoiled.audited["raw_weight_max"] == pytest.approx(math.exp(0.5))
    assert spoiled.audited["rollout_ppl"] == pytest.approx((math.exp(2.75 / 2) + math.exp(1.5)) / 2)
    assert spoiled.denominators["log_ratio_mean"] == {"count": 4, "of": "finite valid tokens"}


def test_tokens_that_are_not_finite_are_counted_and_named(spoiled: Report) -> None:
    assert spoiled.audited["num_nonfinite_tokens"] == 2
    assert spoiled.audited["num_valid_tokens"] == 6
    found = finding(spoiled, "non-finite")
    assert found.evidence == {"tokens": 2, "fields": {"old_log_probs": 1, "rollout_log_probs": 1}}
    assert found.where == [
        {"path": "dump", "row": 0, "position": 1},
        {"path": "dump", "row": 1, "position": 1},
    ]


def test_a_nan_counts_as_neither_high_nor_low_and_an_infinite_ratio_counts(spoiled: Report) -> None:
    assert spoiled.metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 6, rel=1e-7)
    assert spoiled.metrics["rollout_corr/rollout_is_ratio_fraction_low"] == 0.0


def test_debug_compare_names_tokens_that_are_not_finite_too() -> None:
    report = report_of(SPOILED, torch.ones(2, 3, dtype=torch.int64), DEBUG)
    assert report.metrics["training/rollout_probs_diff_max"] is None
    assert report.metrics["training/rollout_probs_diff_valid"] == 1
    assert report.audited["log_prob_diff_abs_max"] == 0.5
    assert report.audited["num_nonfinite_tokens"] == 2
    assert finding(report, "non-finite").where[0] == {"path": "dump", "row": 0, "position": 1}
    assert [token["log_ratio"] for token in report.extra["worst_tokens"]] == [0.5, 0.25, 0.0, 0.0]


def test_a_row_of_nan_only_is_left_out_of_audited_sequence_means() -> None:
    report = report_of(pair([[NAN, NAN], [-1.0, -2.0]], [[-1.0, -1.0], [-1.0, -1.0]]), ones_like([[1, 1]] * 2))
    assert report.audited["training_log_ppl"] == 1.5
    assert report.denominators["training_log_ppl"] == {"count": 1, "of": "sequences with a valid token"}
    assert report.audited["num_empty_sequences"] == 0


def test_no_finite_token_at_all_makes_audited_values_null_with_a_reason() -> None:
    report = report_of(pair([[NAN]], [[-1.0]]), ones_like([[1]]))
    nulls = {key for key, value in report.audited.items() if value is None}
    assert nulls == set(report.audited) - {key for key in report.audited if key.startswith("num_")}
    assert all(reasons(report)[f"audited/{key}"].startswith("there are no") for key in nulls)


def test_nan_in_dumped_weights_alone_leaves_the_token_out() -> None:
    weights = torch.tensor([[1.0, NAN, 1.0]], dtype=torch.float64)
    report = report_of(pair([[-1.0, -2.0, -3.0]], [[-1.0, -1.0, -3.0]], rollout_is_weights=weights), ones_like(weights))
    assert report.audited["num_nonfinite_tokens"] == 1
    assert report.audited["log_ratio_mean"] == 0.0
    assert finding(report, "non-finite").evidence["fields"] == {"rollout_is_weights": 1}


# Masks


def test_a_mask_that_is_not_binary_withholds_verl_s_numbers_and_counts_non_zero_as_valid() -> None:
    mask = torch.tensor([[1.0, 0.5, 2.0, 0.0]])
    report = report_of(pair([[-1.0, -2.0, -3.0, -9.0]], [[-1.5, -2.0, -3.0, -1.0]]), mask)
    assert set(report.metrics.values()) == {None}
    why = reasons(report)
    assert all("2 mask values are neither 0 nor 1" in why[key] for key in report.metrics)
    assert report.audited["num_valid_tokens"] == 3
    assert report.audited["log_ratio_mean"] == pytest.approx(0.5 / 3)
    assert finding(report, "mask-not-binary").evidence == {"values": 2}


def test_debug_metrics_stay_under_a_mask_that_is_not_binary() -> None:
    mask = torch.tensor([[1, 3, 0]])
    report = report_of(pair([[-1.0, -2.0, -9.0]], [[-1.5, -2.0, -1.0]]), mask, DEBUG)
    assert report.metrics["training/rollout_probs_diff_max"] == pytest.approx(math.exp(-1.0) - math.exp(-1.5))
    assert "mask-not-binary" in codes(report)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32])
def test_a_mask_of_zeros_and_ones_gives_the_same_numbers_in_any_of_these_dtypes(dtype: torch.dtype) -> None:
    batch = with_holes(3)
    report = report_of(batch.fields, batch.mask.to(dtype), rollout_rs="token_k3", rollout_rs_threshold=0.02)
    wanted = report_of(batch.fields, batch.mask, rollout_rs="token_k3", rollout_rs_threshold=0.02)
    assert (report.metrics, report.audited, codes(report)) == (wanted.metrics, wanted.audited, codes(wanted))


def test_a_float64_mask_divides_by_n_plus_1e_8() -> None:
    fields = pair([[-1.0, -2.0]], [[-1.5, -2.5]])
    guarded = report_of(fields, torch.ones(1, 2, dtype=torch.float64))
    plain = report_of(fields, torch.ones(1, 2, dtype=torch.int64))
    assert plain.metrics["rollout_corr/kl"] == -0.5
    assert guarded.metrics["rollout_corr/kl"] == -1.0 / (2 + 1e-8)
    assert guarded.metrics["rollout_corr/training_log_ppl"] == 3.0 / (2 + 1e-8)
    assert guarded.audited["log_ratio_mean"] == 0.5
    assert guarded.audited["training_log_ppl"] == 1.5
    assert guarded.audited == plain.audited


def test_token_fractions_are_float32_numbers_unless_the_mask_is_float64() -> None:
    fields = raw_weights([3.0, 1.0, 1.0])
    key = "rollout_corr/rollout_is_ratio_fraction_high"
    assert report_of(fields, ones_like([[1, 1, 1]])).metrics[key] == slow.float32(1 / 3)
    assert report_of(fields, torch.ones(1, 3, dtype=torch.float64)).metrics[key] == 1 / (3 + 1e-8)
    assert report_of(fields, ones_like([[1, 1, 1]])).audited["truncated_token_fraction"] == 1 / 3


def test_a_half_precision_mask_rounds_the_count_in_metrics_and_not_in_audited() -> None:
    fields = pair(torch.zeros(1, 257, dtype=torch.float64) - 1.0, torch.zeros(1, 257, dtype=torch.float64) - 2.0)
    report = report_of(fields, torch.ones(1, 257, dtype=torch.bfloat16))
    assert report.metrics["rollout_corr/kl"] == -257 / 256
    assert report.audited["kl_rollout_train_k1"] == -1.0


# Dumped weights beside log-probs


TRAIN, ROLLOUT = (
    torch.tensor([[-1.0, -1.0, -0.2], [-2.0, -1.0, -3.0]]),
    torch.tensor([[-1.5, -0.9, -1.9], [-2.0, -1.0, -2.0]]),
)
RATIO = (TRAIN - ROLLOUT).exp()
APPLIED = RATIO.clamp(max=2.0)


def weights_report(weights: Tensor, **settings: Any) -> Report:
    return report_of(pair(TRAIN, ROLLOUT, rollout_is_weights=weights), torch.ones(2, 3, dtype=torch.int64), **settings)


SEQUENCE = (TRAIN - ROLLOUT).sum(1, keepdim=True).exp().clamp(max=2.0).expand_as(RATIO)
ICEPOP = torch.where((RATIO >= 0.5) & (RATIO <= 5.0), RATIO, 0.0)
AGREEING: dict[str, tuple[Tensor, dict[str, Any]]] = {
    "token": (APPLIED, {}),
    "bfloat16": (APPLIED.bfloat16(), {}),
    "float16": (APPLIED.half(), {}),
    "float64": (APPLIED.double(), {}),
    "sequence": (SEQUENCE, {"rollout_is": "sequence"}),
    "icepop": (ICEPOP, {"rollout_is_threshold": "0.5_5.0"}),
    "normalized": (APPLIED / APPLIED.mean(), {"rollout_is_batch_normalize": True}),
    "normalized-bfloat16": ((APPLIED / APPLIED.mean()).bfloat16(), {"rollout_is_batch_normalize": True}),
    "normalized-sequence": (
        SEQUENCE / SEQUENCE[:, 0].mean(),
        {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
    ),
    "normalized-icepop": (
        ICEPOP / ICEPOP.mean(),
        {"rollout_is_threshold": "0.5_5.0", "rollout_is_batch_normalize": True},
    ),
}


@pytest.mark.parametrize(("weights", "settings"), AGREEING.values(), ids=AGREEING)
def test_dumped_weights_that_agree_give_no_finding(weights: Tensor, settings: dict[str, Any]) -> None:
    assert codes(weights_report(weights, **settings)) == []


DISAGREEING: dict[str, tuple[Tensor, dict[str, Any]]] = {
    "another-threshold": (RATIO.clamp(max=1.5), {}),
    "another-level": (SEQUENCE, {}),
    "normalized-unasked": (APPLIED / APPLIED.mean(), {}),
    "not-truncated": (RATIO, {}),
    "bfloat16-off-by-a-twentieth": (1.05 * APPLIED.bfloat16(), {}),
    "float32-off-by-a-thousandth": (1.001 * APPLIED, {}),
    "normalized-another-threshold": (RATIO.clamp(max=1.5), {"rollout_is_batch_normalize": True}),
}


@pytest.mark.parametrize(("weights", "settings"), DISAGREEING.values(), ids=DISAGREEING)
def test_dumped_weights_that_disagree_are_a_finding(weights: Tensor, settings: dict[str, Any]) -> None:
    assert codes(weights_report(weights, **settings)) == ["weights-disagree"]


def test_weights_that_disagree_are_counted_and_named() -> None:
    weights = APPLIED.clone()
    weights[1, 2] += 0.5
    found = finding(weights_report(weights), "weights-disagree")
    assert found.evidence["disagreeing_tokens"] == 1
    assert found.evidence["tokens"] == 6
    assert found.evidence["dumped_max"] == 2.0
    assert found.where == [{"path": "dump", "row": 1, "position": 2}]


def test_metrics_come_from_the_log_probs_even_where_dumped_weights_disagree() -> None:
    report = weights_report(torch.full_like(RATIO, 1.25))
    assert report.metrics["rollout_corr/rollout_is_mean"] == pytest.approx(float(APPLIED.double().mean()), rel=1e-6)


# What is missing, and what is degenerate


def test_icepop_that_zeroes_every_weight_has_no_effective_sample_size() -> None:
    report = report_of(raw_weights([3.0, 4.0]), ones_like([[1, 1]]), rollout_is_threshold="0.5_2.0")
    assert report.metrics["rollout_corr/rollout_is_mean"] == 0.0
    assert report.metrics["rollout_corr/rollout_is_oob_ratio"] == 1.0
    assert report.metrics["rollout_corr/rollout_is_eff_sample_size"] is None
    assert "every applied weight is 0" in reasons(report)["rollout_corr/rollout_is_eff_sample_size"]
    assert report.audited["ess_applied_tokens"] is None
    assert "audited/ess_applied_tokens" in reasons(report)


def test_a_batch_norm_factor_of_nothing_but_zeros_is_1() -> None:
    settings: dict[str, Any] = {"rollout_is_threshold": "0.5_2.0", "rollout_is_batch_normalize": True}
    for level in ("token", "sequence"):
        report = report_of(raw_weights([3.0, 4.0]), ones_like([[1, 1]]), rollout_is=level, **settings)
        assert report.metrics["rollout_corr/rollout_is_batch_norm_factor"] == 1.0


@pytest.mark.parametrize("command", [IS, DEBUG])
def test_equal_log_probs_are_a_finding(command: str) -> None:
    batch = ragged(0)
    report = report_of(pair(batch.rollout, batch.rollout), batch.mask, command)
    assert codes(report) == ["identical"]
    assert finding(report, "identical").evidence == {"tokens": int(batch.mask.sum())}


def test_one_token_that_differs_is_not_identical() -> None:
    batch = ragged(0)
    train = batch.rollout.clone()
    train[0, 0] += 1e-12
    assert codes(report_of(pair(train, batch.rollout), batch.mask)) == []


def test_train_log_probs_alone_give_the_train_perplexity_and_name_what_is_missing() -> None:
    report = report_of({"old_log_probs": torch.tensor([[-1.0, -3.0], [-1.0, -9.0]])}, torch.tensor([[1, 1], [1, 0]]))
    assert report.metrics["rollout_corr/training_log_ppl"] == 1.5
    assert report.metrics["rollout_corr/training_ppl"] == pytest.approx((math.e**2 + math.e) / 2)
    assert report.audited["training_log_ppl"] == 1.5
    given = {"rollout_corr/training_ppl", "rollout_corr/training_log_ppl"}
    assert {key for key, value in report.metrics.items() if value is not None} == given
    assert {key for key, value in report.audited.items() if value is not None} == {
        "training_ppl",
        "training_log_ppl",
        "num_sequences",
        "num_empty_sequences",
        "num_valid_tokens",
        "num_nonfinite_tokens",
    }
    nulls = [*(set(report.metrics) - given), *(f"audited/{key}" for key, x in report.audited.items() if x is None)]
    assert all("rollout_log_probs" in reasons(report)[key] for key in nulls)


def test_a_positive_log_prob_is_a_finding_and_the_rounding_of_0_is_not() -> None:
    mask = ones_like([[1, 1]])
    assert codes(report_of(pair([[-1.0, 1.0]], [[-1.0, -1.0]]), mask)) == ["positive-log-prob"]
    assert codes(report_of(pair([[-1.0, 5e-4]], [[-1.0, -1.0]]), mask)) == []
    assert codes(report_of(pair([[-1.0, 9.0]], [[-1.0, 9.0]]), torch.tensor([[1, 0]]))) == []


def test_a_healthy_batch_gives_no_finding_and_no_note() -> None:
    batch = ragged(0)
    for command in (IS, DEBUG):
        report = report_of(pair(batch.train - 0.5, batch.rollout - 0.5), batch.mask, command)
        assert (report.findings, report.correction) == ([], "")
        assert set(reasons(report)) <= {"audited/khat_sequences", "audited/khat_threshold_sequences"}
        assert not [note for note in report.notes if not note.about]
