"""The pieces of an HTML page that needs nothing else: no network, no script, light and dark, phone and desk."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

from hvd_train.report.charts import DARK, LIGHT, Chart, svg

GENERATOR = '<meta name="generator" content="hvd-train report">'


def _tones(tones: Sequence[str]) -> str:
    return " ".join(f"--tone-{number}: {tone};" for number, tone in enumerate(tones))


_STYLE = f"""
:root {{
  color-scheme: light dark;
  --ink: #1d1f23; --muted: #5c6068; --grid: #e1e4e8; --paper: #ffffff; --ground: #f5f6f8; --warn: #8a4b00;
  {_tones(LIGHT)}
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    --ink: #e8eaed; --muted: #a2a8b1; --grid: #363a41; --paper: #1b1e23; --ground: #121417; --warn: #ffbf69;
    {_tones(DARK)}
  }}
}}
* {{ box-sizing: border-box; }}
body {{
  margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
}}
main, header {{ max-width: 1240px; margin: 0 auto; padding: 0 16px; }}
header {{ padding-top: 20px; }}
h1 {{ font-size: 1.5rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.15rem; margin: 0 0 10px; }}
h3 {{ font-size: 1rem; margin: 18px 0 6px; overflow-wrap: anywhere; }}
p {{ margin: 6px 0; max-width: 75ch; overflow-wrap: anywhere; }}
a {{ color: var(--tone-0); }}
nav {{ display: flex; flex-wrap: wrap; gap: 4px 14px; margin: 8px 0 0; font-size: .9rem; }}
section {{
  background: var(--paper); border: 1px solid var(--grid); border-radius: 10px;
  margin: 16px 0; padding: 16px; scroll-margin-top: 8px;
}}
.muted {{ color: var(--muted); font-size: .9rem; }}
.gap {{ border-left: 4px solid var(--warn); padding: 2px 10px; color: var(--warn); margin: 8px 0; }}
.grid {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 350px), 1fr)); gap: 18px; }}
figure {{ margin: 0; min-width: 0; }}
svg {{ display: block; width: 100%; max-width: 540px; height: auto; }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(135px, 1fr)); gap: 10px; margin: 0; }}
.cards div {{ border: 1px solid var(--grid); border-radius: 8px; padding: 8px 10px; min-width: 0; }}
.cards dt {{ color: var(--muted); font-size: .8rem; }}
.cards dd {{ margin: 0; font-size: 1.1rem; font-weight: 600; overflow-wrap: anywhere; line-height: 1.3; }}
.scroll {{ overflow-x: auto; max-width: 100%; }}
table {{ border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 4px 10px; text-align: left; border-bottom: 1px solid var(--grid); vertical-align: top; }}
td {{ max-width: 46ch; overflow-wrap: break-word; }}
thead th {{ color: var(--muted); font-weight: 600; vertical-align: bottom; }}
tbody th {{ font-weight: 600; position: sticky; left: 0; background: var(--paper); max-width: 42vw;
  overflow-wrap: break-word; }}
.n {{ text-align: right; white-space: nowrap; }}
.matrix td {{ text-align: center; padding: 3px 6px; min-width: 2.4em; border: 1px solid var(--grid); }}
.matrix td.right {{ outline: 2px solid var(--ink); outline-offset: -2px; font-weight: 600; }}
.matrix thead th {{ text-align: center; padding: 3px 6px; }}
.bar {{ display: block; height: 6px; margin-top: 3px; background: var(--tone-0); border-radius: 2px; }}
.pictures {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(108px, 1fr)); gap: 12px; }}
.pictures img {{ width: 96px; height: 96px; object-fit: contain; image-rendering: pixelated;
  border: 1px solid var(--grid); }}
.pictures figcaption {{ font-size: .8rem; line-height: 1.35; overflow-wrap: anywhere; }}
details {{ margin: 10px 0 0; }}
summary {{ cursor: pointer; color: var(--tone-0); }}
.tabs > input {{ position: absolute; opacity: 0; }}
.tabs > label {{
  display: inline-block; padding: 3px 10px; margin: 0 2px 12px; border: 1px solid var(--grid); border-radius: 14px;
  cursor: pointer; font-size: .9rem;
}}
.tabs > input:checked + label {{ border-color: var(--ink); font-weight: 600; text-decoration: underline; }}
.tabs > input:focus-visible + label {{ outline: 2px solid var(--tone-0); }}
.tabs > .grid {{ display: none; }}
.tabs > #tab-0:checked ~ .tab-0, .tabs > #tab-1:checked ~ .tab-1, .tabs > #tab-2:checked ~ .tab-2 {{ display: grid; }}
@media (max-width: 500px) {{ main, header {{ padding: 0 8px; }} section {{ padding: 12px; }} }}
@media print {{ body {{ background: none; }} .tabs > .grid {{ display: grid; }} section {{ break-inside: avoid; }} }}
"""


def document(title: str, subtitle: str, sections: Sequence[tuple[str, str]]) -> str:
    """A whole page: sections are (heading, body)."""
    names = [f"s{number}" for number in range(len(sections))]
    links = "".join(
        f'<a href="#{name}">{escape(heading)}</a>' for name, (heading, _) in zip(names, sections, strict=True)
    )
    bodies = "\n".join(
        f'<section id="{name}">\n<h2>{escape(heading)}</h2>\n{body}\n</section>'
        for name, (heading, body) in zip(names, sections, strict=True)
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{GENERATOR}
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p class="muted">{escape(subtitle)}</p>
<nav aria-label="Sections">{links}</nav>
</header>
<main>
{bodies}
</main>
</body>
</html>
"""


def gap(text: str) -> str:
    """What is missing, and why."""
    return f'<p class="gap">{escape(text)}</p>'


def gaps(found: Iterable[tuple[str, str]]) -> str:
    """Of several runs (name, what is missing): those that miss the same are named together."""
    together: dict[str, list[str]] = {}
    for name, text in found:
        together.setdefault(text, []).append(name)
    return "".join(gap(f"{_some(names)}: {text}" if any(names) else text) for text, names in together.items())


def _some(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def paragraph(text: str) -> str:
    """A sentence or two beside what they are about."""
    return f'<p class="muted">{escape(text)}</p>'


def heading(text: str) -> str:
    """Above one run's part of a section."""
    return f"<h3>{escape(text)}</h3>"


def cards(facts: Iterable[tuple[str, str]]) -> str:
    """A few facts, each with its name."""
    return '<dl class="cards">' + "".join(_card(name, value) for name, value in facts) + "</dl>"


def _card(name: str, value: str) -> str:
    return f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> str:
    """A table whose first column names the rows; `numbers`: the others are aligned as such."""
    kind = ' class="n"' if numbers else ""
    top = "".join(f'<th scope="col"{kind if place else ""}>{escape(name)}</th>' for place, name in enumerate(head))
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td{kind}>{escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def shares(head: Sequence[str], rows: Iterable[tuple[str, Sequence[tuple[str, float]]]]) -> str:
    """A table of (text, share of 1), each with a bar as long as its share."""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(
            f'<td>{escape(text)}<span class="bar" style="width: {100 * share:.1f}%"></span></td>'
            for text, share in cells
        )
        + "</tr>"
        for name, cells in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def matrix(names: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    """How often each row's class was taken for each column's: the darker the larger the share of the row."""
    top = "".join(f'<th scope="col" title="{escape(name)}">{escape(name[:10])}</th>' for name in names)
    body = ""
    for row, (name, line) in enumerate(zip(names, counts, strict=True)):
        body += f'<tr><th scope="row">{escape(name)}</th>'
        for column, count in enumerate(line):
            right = ' class="right"' if row == column else ""
            depth = round(60 * count / max(1, sum(line)))
            tint = f' style="background: color-mix(in srgb, var(--tone-0) {depth}%, transparent)"' if depth else ""
            body += f"<td{right}{tint}>{count or '·'}</td>"
        body += f'<td class="n">{line[row] / sum(line):.1%}</td></tr>' if sum(line) else "<td>none</td></tr>"
    return (
        f'<div class="scroll"><table class="matrix"><thead><tr><td></td>{top}<th scope="col">right</th></tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def pictures(shown: Iterable[tuple[bytes, str]]) -> str:
    """PNG images, each with what stands below it."""
    found = "".join(
        f'<figure><img alt="" src="data:image/png;base64,{base64.b64encode(image).decode()}">'
        f"<figcaption>{escape(text)}</figcaption></figure>"
        for image, text in shown
    )
    return f'<div class="pictures">{found}</div>'


def details(summary: str, body: str) -> str:
    """What is there on a click."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def figures(charts: Iterable[Chart]) -> str:
    """Charts side by side, as many as fit."""
    return f'<div class="grid">{_figures(charts)}</div>'


def tabs(choices: Sequence[tuple[str, Sequence[Chart]]]) -> str:
    """The same charts over one axis or another (up to three); without a script."""
    buttons = "".join(
        f'<input type="radio" name="tabs" id="tab-{place}"{" checked" if not place else ""}>'
        f'<label for="tab-{place}">{escape(name)}</label>'
        for place, (name, _) in enumerate(choices)
    )
    grids = "".join(
        f'<div class="grid tab-{place}">{_figures(charts)}</div>' for place, (_, charts) in enumerate(choices)
    )
    return f'<div class="tabs"><span class="muted">over </span>{buttons}{grids}</div>'


def _figures(charts: Iterable[Chart]) -> str:
    return "".join(f"<figure>{svg(chart)}</figure>" for chart in charts)
