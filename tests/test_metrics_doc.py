"""METRICS.md says what the code does: every key, its command, formula and denominator; findings, settings, presets.

The page's formulas are Python in the names of its section "Words". Here they are evaluated on the tokens of small
dumps, with plain torch and no code of the package, and compared with what the commands report.
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import rollout_audit
from rollout_audit.cli import run
from rollout_audit.config import PRESETS, SUPPORTED_ROLLOUT_RS_OPTIONS, Settings
from tests import reference as slow

PAGE = Path(__file__).parents[1] / "METRICS.md"
VERL = Path(__file__).parent / "goldens" / "verl"
DIAGNOSIS = Path(rollout_audit.__file__).parent / "diagnosis"

K1 = "token_k1,seq_sum_k1,seq_mean_k1"
K23 = ",".join(option for option in SUPPORTED_ROLLOUT_RS_OPTIONS if not option.endswith("k1"))
THRESHOLDS = "0.001,0.001,0.02,0.02,0.001,0.001,0.005,0.005"  # in the order of K23; each rejects some, not all
SETTINGS: tuple[tuple[str, ...], ...] = (
    (),
    ("--rollout-is-threshold", "0.9_1.2", "--rollout-is-batch-normalize"),
    ("--rollout-is", "sequence", "--rollout-is-threshold", "1.5"),
    ("--rollout-is", "sequence", "--rollout-is-threshold", "0.5_5.0", "--rollout-is-batch-normalize"),
    ("--rollout-is", "none", "--rollout-rs", K1, "--rollout-rs-threshold", "0.97_1.2,0.9_1.3,0.99_1.02"),
    ("--rollout-is", "none", "--rollout-rs", K23, "--rollout-rs-threshold", THRESHOLDS),
    ("--rollout-is", "none", "--rollout-rs", "token_k2", "--rollout-rs-threshold", "0.001"),
)
Report = dict[str, Any]
Run = Callable[..., Report]


# The page


@dataclass
class Table:
    """A table of the page, the heading it stands under and the commands that heading names."""

    heading: str
    commands: frozenset[str]
    header: list[str]
    rows: list[list[str]] = field(default_factory=list)


@dataclass
class Entry:
    """One documented key; formulas by level ("token", "sequence", or "" for both)."""

    heading: str
    commands: frozenset[str]
    formulas: dict[str, str]
    unit: str
    over: str
    option: str = ""


def ticked(text: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", text)


def tables() -> Iterator[Table]:
    heading, commands, table = "", frozenset[str](), None
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading, commands = line.lstrip("# "), frozenset()
        elif line.startswith("Commands: "):
            commands = frozenset(ticked(line))
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]] if line.startswith("|") else []
        if not cells:
            table = None
        elif table is None:
            table = Table(heading, commands, cells)
            yield table
        elif not set(line) <= set("|- "):
            assert len(cells) == len(table.header), line
            table.rows.append(cells)


def with_header(first: str) -> list[Table]:
    return [table for table in tables() if table.header[0] == first]


def formulas(cell: str) -> dict[str, str]:
    return {level: formula for level, formula in re.findall(r"(?:(token|sequence): )?`([^`{]+)`", cell)}


def documented() -> dict[str, Entry]:
    """Every key of the page, patterns expanded."""
    plain: dict[str, Entry] = {}
    patterns: dict[str, Entry] = {}
    for table in with_header("key"):
        assert table.header == ["key", "meaning", "formula", "unit", "over"]
        for cell, _, formula, unit, over in table.rows:
            (key,) = ticked(cell)
            assert key not in plain, f"{key} stands twice"
            entry = Entry(table.heading, table.commands, formulas(formula), unit, over)
            (patterns if "{" in key else plain)[key] = entry
    result = dict(plain)
    for pattern, entry in patterns.items():
        for key, expanded in expand(pattern, entry, plain):
            assert key not in result, f"{key} stands twice"
            result[key] = expanded
    return result


def expand(pattern: str, entry: Entry, plain: dict[str, Entry]) -> Iterator[tuple[str, Entry]]:
    if "{key}" in pattern:
        for key, other in plain.items():
            if other.heading in ("Log ratio and probability", "Divergence over tokens, audited"):
                short = key.removeprefix("audited/")
                yield (
                    pattern.replace("{key}", short),
                    Entry(entry.heading, entry.commands, other.formulas, other.unit, entry.over),
                )
        return
    for option in SUPPORTED_ROLLOUT_RS_OPTIONS:
        named = pattern.replace("{option}", option)
        if "{statistic}" not in named:
            yield named, Entry(entry.heading, entry.commands, entry.formulas, entry.unit, entry.over, option)
            continue
        for cell, _, formula, unit, over, rules in with_header("statistic")[0].rows:
            if rules == "all" or option.endswith(rules):
                full = named.replace("{statistic}", ticked(cell)[0])
                yield full, Entry(entry.heading, entry.commands, formulas(formula), unit, over, option)


# The runs


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: str | Path) -> Report:
        status = run([*map(str, words), "--json"])
        out, err = capsys.readouterr()
        assert status == 0, err
        document: Report = json.loads(out)
        return document

    return call


def values(document: Report) -> dict[str, Any]:
    return {**document["metrics"], **{f"audited/{key}": value for key, value in document["audited"].items()}}


def save(path: Path, **fields: Tensor) -> Path:
    save_file({name: x.clone().contiguous() for name, x in fields.items()}, path)
    return path


def made_dump(path: Path, scale: float, times: int = 1) -> Path:
    """Seven rows, one of them empty, one with a hole, one of a single token; `scale` is the noise of the log ratio.

    The lengths come back as many `times`.
    """
    generator = torch.Generator().manual_seed(7)
    rollout_BT = -3 * torch.rand(7 * times, 40, generator=generator, dtype=torch.float64) - 0.01
    ratio_BT = scale * torch.randn(7 * times, 40, generator=generator, dtype=torch.float64)
    mask_BT = torch.zeros(7 * times, 40, dtype=torch.int64)
    for row, length in enumerate((40, 17, 0, 1, 9, 33, 25) * times):
        mask_BT[row, :length] = 1
    mask_BT[5, 10:14] = 0
    ids_BT = torch.randint(0, 1000, (7 * times, 40), generator=generator)
    old_BT = (rollout_BT + ratio_BT).clamp(max=0.0)
    if scale > 1:
        rollout_BT[0, 3], old_BT[0, 3] = -25.1, -0.1
        rollout_BT[1, 2], old_BT[1, 2] = -0.2, -26.0
    return save(path, rollout_log_probs=rollout_BT, old_log_probs=old_BT, response_mask=mask_BT, responses=ids_BT)


def all_reports(report: Run, tmp_path: Path) -> Iterator[Report]:
    dumps = [made_dump(tmp_path / f"noise_{scale}.safetensors", scale) for scale in (0.05, 3.0)]
    dumps.append(made_dump(tmp_path / "more_rows.safetensors", 0.3, times=5))
    dumps += [VERL / f"{name}.safetensors" for name in ("ragged", "empty_row", "single_token", "float_mask")]
    for dump in dumps:
        for words in SETTINGS:
            yield report("is-metrics", dump, *words)
        yield report("is-metrics", dump, "--verl-before-6806")
        yield report("debug-compare", dump)
        yield report("debug-compare", dump, dump)
        yield report("inspect", dump)
    mask, weights = torch.ones(2, 3), torch.tensor([[0.5, 1.0, 2.0], [1.0, 2.0, 0.3]])
    only = save(tmp_path / "weights.safetensors", rollout_is_weights=weights, response_mask=mask)
    fields = {"rollout_is_weights": weights.clamp(max=1.5), "raw_rollout_is_weights": weights}
    both = save(tmp_path / "raw.safetensors", **fields, response_mask=mask)
    train = save(tmp_path / "train.safetensors", old_log_probs=-weights, response_mask=mask)
    for dump in (only, both, train):
        yield report("is-metrics", dump)
        yield report("inspect", dump)
    spoiled = load_file(dumps[0])
    spoiled["old_log_probs"][0, 0] = math.nan
    nan = save(tmp_path / "nan.safetensors", **spoiled)
    for command in ("is-metrics", "debug-compare", "inspect"):
        yield report(command, nan)


def test_every_key_that_comes_out_is_documented(report: Run, tmp_path: Path) -> None:
    keys = {key for document in all_reports(report, tmp_path) for key in values(document)}
    assert keys - set(documented()) == set()


def test_every_documented_key_comes_out_of_the_commands_it_names(report: Run, tmp_path: Path) -> None:
    commands = defaultdict(set)
    numbers = set()
    for document in all_reports(report, tmp_path):
        for key, value in values(document).items():
            commands[key].add(document["command"])
            if value is not None:
                numbers.add(key)
    page = documented()
    assert {key: set(entry.commands) for key, entry in page.items()} == dict(commands)
    assert numbers == set(page)


def test_denominators_are_those_of_the_page(report: Run, tmp_path: Path) -> None:
    of = {
        "N": "valid tokens",
        "B": "sequences",
        "F": "sequences with a valid token",
        "K": "tokens kept by rejection",
        "padding": "positions of padding",
    }
    page = documented()
    for document in all_reports(report, tmp_path):
        got = {key: over["of"].removeprefix("finite ") for key, over in document["denominators"].items()}
        assert got == {key: of[page[f"audited/{key}"].over] for key in got}


def test_keys_named_anywhere_on_the_page_exist() -> None:
    page = documented()
    named = set(re.findall(r"`((?:rollout_corr|training|audited)/[\w/]+)`", PAGE.read_text(encoding="utf-8")))
    named |= {name for table in with_header("our key") for row in table.rows for name in ticked(row[0])}
    assert named - set(page) == set()


def test_units_are_those_of_the_page() -> None:
    units = {"nats", "probability", "ratio", "perplexity", "share", "count", "correlation", "shape"}
    text = PAGE.read_text(encoding="utf-8").replace("\n", " ")
    assert units == set(re.findall(r"\*\*(\w+)\*\*", text[text.index("Units:") : text.index("Formulas are written")]))
    assert {entry.unit for entry in documented().values()} == units


# The formulas


def tensor(x: Any) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float64)


def quantile(x: Any, q: float) -> Tensor:
    return torch.quantile(tensor(x), q)


def ranks(x: Any) -> Tensor:
    x_N = tensor(x)
    below_N = (x_N[None, :] < x_N[:, None]).sum(1)
    equal_N = (x_N[None, :] == x_N[:, None]).sum(1)
    return below_N + (equal_N + 1) / 2.0


def ess(x: Any) -> Tensor:
    return tensor(x).sum() ** 2 / (tensor(x).numel() * tensor(x).square().sum())


def khat(x: Any) -> float:
    return slow.khat(tensor(x).tolist())


def words(path: Path, keep_N: Tensor | None = None) -> dict[str, Any]:
    """The names of the section "Words" for one dump: its values and the functions over them."""
    dump = load_file(path)
    valid_BT = dump["response_mask"] != 0
    row_N = torch.nonzero(valid_BT)[:, 0]
    p, r = dump["old_log_probs"][valid_BT].double(), dump["rollout_log_probs"][valid_BT].double()
    num_rows = valid_BT.shape[0]
    if keep_N is not None:
        row_N, p, r = row_N[keep_N], p[keep_N], r[keep_N]
    lengths_B = torch.bincount(row_N, minlength=num_rows)
    filled_B = lengths_B > 0

    def by_row(reduce: Callable[[Tensor], Tensor]) -> Callable[[Any], Tensor]:
        def over(x: Any) -> Tensor:
            x_N = tensor(x)
            return tensor([float(reduce(x_N[row_N == row])) if filled_B[row] else 0.0 for row in range(num_rows)])

        return over

    sum_i = by_row(torch.sum)
    d = p - r
    big = sum_i(d)
    return {
        "p": p,
        "r": r,
        "d": d,
        "w": d.exp(),
        "D": big,
        "W": big.exp(),
        "N": row_N.numel(),
        "B": num_rows,
        "F": int(filled_B.sum()),
        "eps": 1e-8,
        "sum_t": lambda x: tensor(x).sum(),
        "mean_t": lambda x: tensor(x).mean(),
        "min_t": lambda x: tensor(x).min(),
        "max_t": lambda x: tensor(x).max(),
        "std_t": lambda x: tensor(x).std(correction=0),
        "std1_t": lambda x: tensor(x).std(correction=1),
        "avg_t": lambda x: tensor(x).sum() / (row_N.numel() + 1e-8),
        "sum_i": sum_i,
        "mean_i": by_row(torch.mean),
        "min_i": by_row(torch.min),
        "max_i": by_row(torch.max),
        "avg_i": lambda x: sum_i(x) / (lengths_B + 1e-8),
        "mean_B": lambda y: tensor(y).mean(),
        "min_B": lambda y: tensor(y).min(),
        "max_B": lambda y: tensor(y).max(),
        "std1_B": lambda y: tensor(y).std(correction=1),
        "sum_F": lambda y: tensor(y)[filled_B].sum(),
        "mean_F": lambda y: tensor(y)[filled_B].mean(),
        "min_F": lambda y: tensor(y)[filled_B].min(),
        "max_F": lambda y: tensor(y)[filled_B].max(),
        "std_F": lambda y: tensor(y)[filled_B].std(correction=0),
        "std1_F": lambda y: tensor(y)[filled_B].std(correction=1),
        "ess_t": ess,
        "ess_F": lambda y: ess(tensor(y)[filled_B]),
        "khat_t": khat,
        "khat_F": lambda y: khat(tensor(y)[filled_B]),
        "quantile_t": quantile,
        "quantile_F": lambda y, q: quantile(tensor(y)[filled_B], q),
        "pearson_t": lambda x, y: torch.corrcoef(torch.stack([tensor(x), tensor(y)]))[0, 1],
        "rank_t": ranks,
        "clip20": lambda x: tensor(x).clamp(-20, 20),
        "clamp": lambda x, a, b: tensor(x).clamp(a, b),
        "exp": lambda x: tensor(x).exp(),
        "log": lambda x: tensor(x).log(),
        "sqrt": lambda x: tensor(x).clamp(min=0).sqrt(),
        "abs": builtins.abs,
        "min": builtins.min,
        "row_N": row_N,
    }


def evaluate(formula: str, names: dict[str, Any]) -> float:
    return float(eval(formula, {"__builtins__": {}}, names))


def with_weights(names: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """u, v and their bounds, as section "Settings" has them."""
    clip20, exp = names["clip20"], names["exp"]
    u = exp(clip20(names["d"])) if settings.rollout_is == "token" else exp(clip20(names["D"]))[names["row_N"]]
    lower, upper = settings.lower, settings.upper
    low = 1 / upper if lower is None else lower
    v = u.clamp(max=upper) if lower is None else torch.where((u < lower) | (u > upper), 0.0, u)
    return names | {"u": u, "v": v, "lo": low, "hi": upper, "outside": lambda x: (x < low) | (x > upper)}


def estimators() -> tuple[dict[str, str], dict[str, str]]:
    """Formula of `s` for each estimator and of `S` for each rule, from the page's table of rules."""
    (table,) = [table for table in with_header("level") if table.heading == "Rejection"]
    by_estimator = {cell.split(":")[0]: ticked(cell)[0] for cell in table.header[2:]}
    by_option = {}
    for row in table.rows:
        for estimator, cell in zip(by_estimator, row[2:], strict=True):
            for option in ticked(cell):
                assert option.endswith(f"_{estimator}")
                by_option[option] = ticked(row[1])[0]
    return by_estimator, by_option


def with_rule(names: dict[str, Any], option: str, lower: float | None, upper: float) -> dict[str, Any]:
    by_estimator, by_option = estimators()
    s = eval(by_estimator[option[-2:]], {"__builtins__": {}}, names)
    big = eval(by_option[option], {"__builtins__": {}}, names | {"s": s})
    if not option.startswith("token"):
        s = big[names["row_N"]]
    low, high = (0.0, upper) if lower is None else (math.log(lower), math.log(upper))

    def rejected(x: Tensor) -> Tensor:
        return (x > high) if lower is None else (x < low) | (x > high)

    return names | {"s": s, "S": big, "low": low, "high": high, "rejected": rejected}


def expected(document: Report, dump: Path, page: dict[str, Entry]) -> dict[str, float]:
    """What the page's formulas give for every number of a report."""
    names = words(dump)
    kept = names
    rules: dict[str, dict[str, Any]] = {}
    level = "token"
    if document["command"] == "is-metrics":
        chosen = document["settings"]
        keys = ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold")
        settings = Settings(**{key: chosen[key] for key in keys})
        level = str(settings.rollout_is)
        if settings.rollout_is:
            names = with_weights(names, settings)
        rules = {rule.option: with_rule(names, rule.option, rule.lower, rule.upper) for rule in settings.rules}
        if rules:
            rejections = [rule["rejected"](rule["s"]) for rule in rules.values()]
            names["dropped"] = torch.stack(rejections).any(0)
            kept = words(dump, ~names["dropped"])
    result = {}
    for key, value in values(document).items():
        entry = page[key]
        where = "token" if entry.option.startswith("token") else "sequence" if entry.option else level
        formula = entry.formulas.get(where) or entry.formulas.get("")
        if value is not None and formula is not None:
            space = rules[entry.option] if entry.option else kept if entry.over == "K" else names
            result[key] = evaluate(formula, space)
    return result


@pytest.mark.parametrize(("noise", "times"), [(0.05, 1), (3.0, 1), (0.3, 5)])
@pytest.mark.parametrize(
    "words_of_command",
    [*(("is-metrics", *settings) for settings in SETTINGS), ("debug-compare",), ("inspect",)],
    ids=" ".join,
)
def test_the_formulas_of_the_page_give_the_numbers(
    words_of_command: tuple[str, ...], noise: float, times: int, report: Run, tmp_path: Path
) -> None:
    dump = made_dump(tmp_path / "dump.safetensors", noise, times)
    document = report(words_of_command[0], dump, *words_of_command[1:])
    page, got = documented(), values(document)
    want = expected(document, dump, page)
    without = {key for key in got if key not in want and got[key] is not None}
    assert without <= {f"audited/num_nonfinite_{what}" for what in ("tokens", "values", "padding")}
    # relative 1e-6: verl's shares are float32 numbers; absolute 1e-6: verl's std is round-off where it should be 0
    wrong = {
        key: (got[key], want[key])
        for key in want
        if not math.isclose(got[key], want[key], rel_tol=1e-6, abs_tol=1e-6 if key.endswith("std") else 1e-12)
    }
    assert not wrong


def test_the_dumps_of_the_formulas_touch_every_rule_and_bound(report: Run, tmp_path: Path) -> None:
    dump = made_dump(tmp_path / "dump.safetensors", 0.05)
    for words_of_rules in SETTINGS[4:6]:
        audited = report("is-metrics", dump, *words_of_rules)["audited"]
        for key, share in audited.items():
            if key.startswith("rejected_by_"):
                assert 0 < share < 1, key
    assert 0 < report("is-metrics", dump, *SETTINGS[1])["audited"]["truncated_token_fraction"] < 1
    assert report("is-metrics", made_dump(dump, 3.0))["audited"]["clamped_tokens"] == 2


def test_every_name_in_a_formula_is_explained(tmp_path: Path) -> None:
    cells = [name for row in with_header("name")[0].rows for name in ticked(row[0])]
    explained = {re.split(r"\W", name)[0] for name in cells}
    names = with_weights(words(made_dump(tmp_path / "dump.safetensors", 0.05)), Settings())
    names = with_rule(names, "token_k1", 0.5, 2.0) | {"dropped": None}
    assert explained == set(names) - {"row_N"}


# Findings, settings, presets


def finding_codes() -> set[str]:
    """First argument of every Finding that is made in diagnosis/."""
    codes = set()
    for path in DIAGNOSIS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding":
                code = [*node.args[:1], *(word.value for word in node.keywords if word.arg == "code")][0]
                assert isinstance(code, ast.Constant), f"{path.name}: a code is spelled where its Finding is made"
                codes.add(str(code.value))
    return codes


def documented_findings() -> dict[str, tuple[str, set[str]]]:
    """Severity and names of evidence, by code."""
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index("\n## Findings") : text.index("\n## Settings")]
    result = {}
    for part in section.split("\n### ")[1:]:
        (code,) = ticked(part.splitlines()[0])
        severity = re.search(r"^Severity: (\w+)\b", part, re.MULTILINE)
        evidence = re.search(r"^Evidence: (.*?)\nTry: \S", part, re.MULTILINE | re.DOTALL)
        assert severity, code
        assert evidence, code
        result[code] = severity[1], set(ticked(evidence[1].split(";")[0]))
    return result


def faulty_dumps(folder: Path) -> Iterator[Path]:
    rollout = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -0.1, -1.5]])
    train, mask = rollout - 0.01, torch.ones(2, 3)

    def dump(name: str, **fields: Tensor) -> Path:
        plain = {"rollout_log_probs": rollout, "old_log_probs": train, "response_mask": mask}
        return save(folder / f"{name}.safetensors", **(plain | fields))

    yield dump("nan", old_log_probs=torch.where(rollout == -0.5, torch.nan, train))
    yield dump("positive", rollout_log_probs=-rollout)
    yield dump("mask", response_mask=2 * mask)
    yield dump("same", old_log_probs=rollout)
    yield dump("empty", response_mask=torch.tensor([[1, 1, 1], [0, 0, 0]]))
    yield dump("weights", rollout_is_weights=3 * mask)


def test_every_finding_is_documented_with_its_severity_and_evidence(report: Run, tmp_path: Path) -> None:
    page = documented_findings()
    assert set(page) == finding_codes()
    found = {}
    for path in faulty_dumps(tmp_path):
        for finding in report("is-metrics", path)["findings"]:
            found[finding["code"]] = finding["severity"], set(finding["evidence"])
    assert found == {code: page[code] for code in found}
    assert found


def cell_of(value: object) -> str:
    return "none" if value is None else str(value).lower()


def test_the_rules_of_the_page_are_those_of_the_code() -> None:
    assert sorted(estimators()[1]) == sorted(SUPPORTED_ROLLOUT_RS_OPTIONS)


def test_the_presets_of_the_page_are_those_of_the_code() -> None:
    (table,) = with_header("preset")
    names = [ticked(cell)[0] for cell in table.header[1:]]
    page = {ticked(row[0])[0]: dict(zip(names, row[1:], strict=True)) for row in table.rows}
    code = {name: {key: cell_of(value) for key, value in preset.items()} for name, preset in PRESETS.items()}
    assert list(page) == list(code)
    assert page == code


def test_the_settings_of_the_page_are_those_of_the_code(report: Run, tmp_path: Path) -> None:
    document = report("is-metrics", made_dump(tmp_path / "dump.safetensors", 0.05))
    page = {ticked(row[0])[0]: row[1] for row in with_header("setting")[0].rows}
    assert page == {name: cell_of(value) for name, value in document["settings"].items()}


def test_the_other_lists_of_the_page_hold_what_it_says(report: Run, tmp_path: Path) -> None:
    (table,) = with_header("command")
    ours = made_dump(tmp_path / "ours.safetensors", 0.05)
    theirs = load_file(ours)
    other = save(tmp_path / "theirs.safetensors", **(theirs | {"responses": theirs["responses"] + 1}))
    for command, name, holds in table.rows:
        value = report(ticked(command)[0], ours, other)[ticked(name)[0]]
        one = value[0] if isinstance(value, list) else value
        assert [word for word in ticked(holds) if not word.startswith("-")] == list(one)
