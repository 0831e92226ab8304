#!/usr/bin/env python3
"""Write the pages of the web site into build/pages; `make docs` makes build/site of them.

They lie as in the clone, so links hold. docs/flags.md, commands.md and api.md are made from the code, without torch.
"""

import ast
import contextlib
import io
import itertools
import os
import re
import shutil
from pathlib import Path

import hvd_train
from hvd_train import cli, config
from hvd_train.commands.names import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "pages"
# Part of the API, though not made by name.
ALSO = ("loops.Epoch", "loops.Step", "loops.Update", "loops.MicroBatch")
STYLE = ".md-grid { max-width: 76rem } td:first-child code { white-space: nowrap }\n"


def fields() -> dict[str, dict[str, tuple[str, str]]]:
    """Return the type in words and the help of each field, by the classes of the config."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for group in ast.parse(Path(config.__file__).read_text(encoding="utf-8")).body:
        body = group.body if isinstance(group, ast.ClassDef) else []
        for at, text in itertools.pairwise(body):
            if isinstance(at, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(group, ast.ClassDef):
                kind = re.sub(r"Literal|tuple|[\[\]']", "", ast.unparse(at.annotation)).replace(" | None", " or none")
                meaning = " ".join(ast.literal_eval(text.value).split())
                found.setdefault(group.name, {})[ast.unparse(at.target)] = kind, meaning
    return found


def flags() -> str:
    """Return the page of all settings."""
    text = "# Flags of a training\n\nA [recipe](../README.md#recipes) sets many of them: `hvd-train config NAME`.\n"
    values, known = config.Config().settings(), fields()
    groups: dict[str, type[object]] = {"general": config.Config, **config.GROUPS}
    for name, group in groups.items():
        text += f"\n## {name.capitalize()}\n\n{group.__doc__}\n\n| flag | default | meaning |\n|---|---|---|\n"
        for field, (kind, meaning) in known[group.__name__].items():
            value = values[field]
            default = " ".join(map(str, value)) if isinstance(value, tuple) else str(value).lower()
            flag = field.replace("_", "-")
            text += f"| `--{flag}`<br>{f'`--no-{flag}`' if kind == 'bool' else kind} | {default} | {meaning} |\n"
    return text


def commands() -> str:
    """Return the page of all commands: what their `--help` prints. Raises RuntimeError if one prints none."""
    os.environ["COLUMNS"] = "80"
    text = f"# Commands\n\n```text\n{cli.overview()}```\n"
    for name in (name for name in COMMANDS if name not in ("config", "sweep")):  # these are as train
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            if cli.run([name, "--help"]) != 0:
                raise RuntimeError(f"hvd-train {name} --help failed")
        body, more, _ = re.sub(" +\n", "\n", shown.getvalue()).partition("\n data options\n")
        text += f"\n## {name}\n\n```text\n{body.rstrip()}\n```\n" + ("\n[All flags](flags.md)\n" if more else "")
    return text


def api() -> str:
    """Return the page of the public names, which mkdocstrings fills from the sources."""
    names = [*(name for name in hvd_train.__all__ if not name.startswith("_")), *ALSO]
    return "# Python API\n\n" + "\n".join(f"::: hvd_train.{name}\n" for name in sorted(names, key=str.lower))


def main() -> None:
    """Write the pages."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for name in ("docs", "examples"):
        shutil.copytree(ROOT / name, PAGES / name)
    made = {"flags": flags, "commands": commands, "api": api}
    texts = {PAGES / "docs" / f"{name}.md": page() for name, page in made.items()}
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "tests" / "fake_gpu" / "README.md"]:
        # Only GitHub needs a backslash before a bar in the code of a table.
        text = re.sub(r"^\|.*", lambda row: row[0].replace(r"\|", "|"), page.read_text(encoding="utf-8"), flags=re.M)
        texts[PAGES / page.relative_to(ROOT)] = text
    for path, text in {**texts, PAGES / "style.css": STYLE}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
