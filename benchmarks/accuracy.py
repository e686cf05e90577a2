"""Many quantized models of one original on the same windows of a text, window by window, into a file that grows.

    python benchmarks/accuracy.py results.jsonl --original MODEL --text wiki.test.raw --windows 24 \
        oasis=quantized-oasis oasis-plus=quantized-plus rtn=quantized-rtn
    python benchmarks/accuracy.py results.jsonl --table

Every window of every model is a line, written when it is done; run again with the same file, only what is missing is
computed. The original's logits are computed once a window for all. `--table` prints the file as Markdown: perplexity,
the loss over a baseline's (with the standard error of a jackknife over windows, which are paired), KL and agreement.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
from rich.progress import track

from oasis_cli.data.text import load_text
from oasis_cli.data.windows import Windows, token_windows
from oasis_cli.evaluation.perplexity import WindowScore, score_window
from oasis_cli.pipeline.evaluating import Opened, open_logits

_ORIGINAL = "original"
Rows = dict[str, dict[int, Mapping[str, Any]]]


@click.command(help=__doc__)
@click.argument("results", type=click.Path(path_type=Path))
@click.argument("models", nargs=-1, metavar="NAME=FOLDER...")
@click.option("--original", help="The model that all others were made from.")
@click.option("--text", help="A data set's name, or a file.")
@click.option("--windows", default=24, show_default=True, help="Windows from the start of the text.")
@click.option("--seqlen", default=2048, show_default=True, help="Tokens in a window.")
@click.option("--table", is_flag=True, help="Print what the file holds, and compute nothing.")
@click.option("--over", default="oasis", show_default=True, help="Whose loss the others' are divided by.")
def main(
    results: Path,
    models: Sequence[str],
    original: str | None,
    text: str | None,
    windows: int,
    seqlen: int,
    table: bool,
    over: str,
) -> None:
    """Compute what is missing, then print the table."""
    rows = read(results)
    if not table:
        if original is None or text is None:
            raise click.UsageError("--original and --text are needed, or --table alone")
        named = {name: folder for name, _, folder in (model.partition("=") for model in models)}
        if not all(named.values()):
            raise click.UsageError("models are given as NAME=FOLDER")
        measure(results, rows, original, named, text, windows, seqlen)
    click.echo(markdown(rows, over))


def read(path: Path) -> Rows:
    """The file's rows by model and window; none where there is no file."""
    rows: Rows = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            rows.setdefault(row["name"], {})[row["window"]] = row
    return rows


def measure(
    path: Path, rows: Rows, original: str, named: Mapping[str, str], text: str, limit: int, seqlen: int
) -> None:
    """Compute what is missing, and add it to the file and to `rows`."""
    source = load_text(text, "evaluation")
    reference = open_logits(original)
    windows = token_windows(source, reference.tokenizer, seqlen, limit, reference.vocabulary)
    opened = {name: open_logits(folder) for name, folder in named.items()}
    for name, model in {_ORIGINAL: reference, **opened}.items():
        _refuse_other(rows.get(name, {}), name, model, windows)
    with path.open("a", encoding="utf-8") as file, torch.no_grad():
        for number, tokens in enumerate(track(windows.tokens, "windows", transient=True)):
            missing = {name: model for name, model in opened.items() if number not in rows.get(name, {})}
            if not missing and number in rows.get(_ORIGINAL, {}):
                continue
            wanted = reference.logits(tokens[None])
            scores = {_ORIGINAL: score_window(wanted, tokens, wanted)}
            for name, model in missing.items():
                scores[name] = score_window(model.logits(tokens[None]), tokens, wanted)
            for name, score in scores.items():
                if number in rows.get(name, {}):
                    continue
                digest = {_ORIGINAL: reference, **opened}[name].digest
                row = {"name": name, "window": number, "seqlen": windows.seqlen, "model": digest}
                row |= {"data": Path(windows.data).name, "text": windows.digest} | asdict(score)
                rows.setdefault(name, {})[number] = row
                file.write(json.dumps(row) + "\n")
            file.flush()


def _refuse_other(known: Mapping[int, Mapping[str, Any]], name: str, model: Opened, windows: Windows) -> None:
    """One name is one model on one text, so that a table mixes nothing."""
    for row in known.values():
        for key, value in (("model", model.digest), ("text", windows.digest), ("seqlen", windows.seqlen)):
            if row[key] != value:
                raise click.ClickException(f"{name}: the file has it with another {key}; use another name or file")


def jackknife(statistic: Callable[[Sequence[int]], float], windows: Sequence[int]) -> tuple[float, float]:
    """A statistic of windows and its standard error, each window left out once."""
    n = len(windows)
    if n < 2:
        return statistic(windows), math.nan
    left_out = [statistic([w for w in windows if w != each]) for each in windows]
    mean = sum(left_out) / n
    return statistic(windows), math.sqrt((n - 1) / n * sum((value - mean) ** 2 for value in left_out))


def markdown(rows: Rows, over: str) -> str:
    """The rows as a table, one model a line."""
    lines = [
        f"| model | windows | perplexity | loss over `{over}`'s | KL (nats) | same top-1 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, own in rows.items():
        scores = {number: _score(row) for number, row in own.items()}
        value, error = jackknife(lambda chosen, s=scores: _perplexity(s, chosen), sorted(scores))
        shared = sorted(scores.keys() & rows.get(over, {}).keys() & rows[_ORIGINAL].keys())
        ratio = ""
        if name != _ORIGINAL and shared:
            base, first = ({n: _score(row) for n, row in rows[key].items()} for key in (over, _ORIGINAL))
            found = jackknife(lambda chosen, s=scores, b=base, f=first: _ratio(s, b, f, chosen), shared)
            ratio = f"{found[0]:.3f} ± {found[1]:.3f}" if name != over else "1"
        kl, agreement = (
            sum(getattr(s, key) for s in scores.values()) / len(scores) for key in ("kl_mean", "agreement")
        )
        cells = [name, str(len(scores)), f"{value:.2f} ± {error:.2f}", ratio, f"{kl:.4f}", f"{agreement:.1%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _score(row: Mapping[str, Any]) -> WindowScore:
    return WindowScore(**{key: row[key] for key in ("nll", "reference_nll", "kl_mean", "kl_max", "agreement")})


def _perplexity(scores: Mapping[int, WindowScore], chosen: Sequence[int]) -> float:
    return math.exp(sum(scores[n].nll for n in chosen) / len(chosen))


def _ratio(
    scores: Mapping[int, WindowScore],
    base: Mapping[int, WindowScore],
    first: Mapping[int, WindowScore],
    chosen: Sequence[int],
) -> float:
    lost, whole = (_perplexity(each, chosen) - _perplexity(first, chosen) for each in (scores, base))
    return lost / whole


if __name__ == "__main__":
    main()
