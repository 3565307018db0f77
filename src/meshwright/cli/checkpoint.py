"""`meshwright checkpoint`: what is saved, read without torch."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError, SpecError
from meshwright.train import stored
from meshwright.train.stored import CHECKPOINTS, MODEL, Stored


def checkpoint(options: argparse.Namespace) -> int:
    """Run the action that was asked for; returns the exit code."""
    root = Path(options.dir)
    if not root.is_dir():
        raise CheckpointError(f"{root}", "is no folder.")
    if options.action == "ls":
        return _ls(root, options.json)
    if options.action == "verify":
        return _verify(root, options.json)
    chosen = _choose(root, hashes=options.action == "export")
    if options.action == "show":
        return _show(chosen, options.json)
    if options.action == "digest":
        print(stored.weights_sha256(chosen.path / MODEL))
        return 0
    return _export(chosen, Path(options.output))


def _folders(root: Path) -> list[Path]:
    """The checkpoint that `root` is, or those in it, newest first."""
    is_run = (root / CHECKPOINTS).is_dir()
    is_one = (root / stored.MANIFEST).exists() or (stored.step_of(root) is not None and not is_run)
    return [root] if is_one else stored.candidates(root)


def _choose(root: Path, *, hashes: bool) -> Stored:
    """The newest good checkpoint of a run folder, or the one given."""
    folders = _folders(root)
    if folders == [root]:
        found = stored.read(root)
        stored.check_files(found, hashes=hashes)
        return found
    good, passed = stored.newest_good(root, hashes=hashes)
    for line in passed:
        print(line, file=sys.stderr)
    if good is None:
        raise _none_in(root, len(folders))
    return good


def _none_in(root: Path, torn: int) -> CheckpointError:
    rule = f"holds no whole checkpoint, and {torn} torn." if torn else "holds no checkpoint."
    return CheckpointError(f"{root}", rule, "Looked for checkpoints/step-00000020/manifest.json and the like.")


def _row(folder: Path) -> dict[str, Any]:
    try:
        found = stored.read(folder)
        stored.check_files(found, hashes=False)
    except CheckpointError as error:
        return {"path": str(folder), "step": stored.step_of(folder), "state": "torn", "because": str(error)}
    size = sum(facts["bytes"] for facts in found.manifest["files"].values())
    keys = ("layout", "tokens", "samples", "weights_sha256")
    return {"path": str(folder), "step": found.step, "state": "whole", "bytes": size} | {
        k: found.manifest.get(k) for k in keys
    }


def _ls(root: Path, as_json: bool) -> int:
    rows = [_row(folder) for folder in _folders(root)]
    if as_json:
        print(json.dumps(rows, indent=1))
    elif not rows:
        print(f"no checkpoints in {root}")
    for row in [] if as_json else rows:
        if row["state"] == "torn":
            print(f"step {row['step']:>8}  torn   {row['because']}")
        else:
            size, digest = f"{row['bytes'] / 1e6:8.1f} MB", str(row["weights_sha256"])[:16]
            print(f"step {row['step']:>8}  whole  {size}  {row['layout']!s:<10}  weights {digest}  {row['path']}")
    return 0


def _show(found: Stored, as_json: bool) -> int:
    if as_json:
        print(json.dumps(found.manifest, indent=1))
        return 0
    for name, value in found.manifest.items():
        if name not in ("recipe", "files"):
            print(f"{name:<15} {value if not isinstance(value, dict | list) else json.dumps(value)}")
    for name, facts in found.manifest["files"].items():
        print(f"{name:<22} {facts['bytes']:>12,} bytes  sha256 {facts['sha256'][:16]}")
    print("recipe:")
    for section, table in found.manifest["recipe"].items():
        print(f"  [{section}] " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in table.items()))
    return 0


def _verify(root: Path, as_json: bool) -> int:
    """Every checkpoint of a run folder, or the one given; exit 5 if one is not whole."""
    folders, rows = _folders(root), []
    if not folders:
        raise _none_in(root, 0)
    for folder in folders:
        try:
            stored.check_files(stored.read(folder), hashes=True)
            rows.append({"path": str(folder), "whole": True, "because": "every byte is as its manifest says"})
        except CheckpointError as error:
            rows.append({"path": str(folder), "whole": False, "because": str(error)})
    if as_json:
        print(json.dumps(rows, indent=1))
    for row in [] if as_json else rows:
        print(f"{'whole' if row['whole'] else 'torn '}  {row['path']}: {row['because']}")
    return 0 if all(row["whole"] for row in rows) else CheckpointError.exit_code


def _export(found: Stored, output: Path) -> int:
    if not output.name or os.path.lexists(output):
        raise SpecError(f"--output {output}", "exists already.", "Name a new file.")
    beside = output.with_name(f".{output.name}.writing")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(found.path / MODEL, beside)
        beside.rename(output)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise CheckpointError(f"--output {output}", f"could not be written: {error.strerror}.") from error
    print(f"{output}: weights of step {found.step}, sha256 {found.manifest['weights_sha256'][:16]}")
    return 0
