"""`meshwright checkpoint`: what is saved, read without torch."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError, SpecError
from meshwright.train import stored
from meshwright.train.stored import MODEL, Stored


def checkpoint(options: argparse.Namespace) -> int:
    """Run the action that was asked for; returns the exit code."""
    root = Path(options.dir)
    if not root.is_dir():
        raise CheckpointError(f"{root}", "is no folder.")
    if options.action == "ls":
        return _ls(root, options.json)
    chosen = _choose(root, hashes=False)
    if options.action == "show":
        return _show(chosen, options.json)
    if options.action == "verify":
        return _verify(root, options.json)
    if options.action == "digest":
        print(stored.weights_sha256(chosen.path / MODEL))
        return 0
    return _export(chosen, Path(options.output))


def _choose(root: Path, *, hashes: bool) -> Stored:
    """The checkpoint that `root` is, or the newest good one in it."""
    if stored.step_of(root) is not None or (root / stored.MANIFEST).exists():
        return stored.read(root)
    found, passed = stored.newest_good(root, hashes=hashes)
    for line in passed:
        print(line)
    if found is None:
        raise CheckpointError(f"{root}", "holds no checkpoint.", "Looked for step-00000000/manifest.json and the like.")
    return found


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
    rows = [_row(folder) for folder in stored.candidates(root)]
    if as_json:
        print(json.dumps(rows, indent=1))
    elif not rows:
        print(f"no checkpoints in {root}")
    for row in [] if as_json else rows:
        if row["state"] == "torn":
            print(f"step {row['step']:>8}  torn   {row['because']}")
        else:
            size, digest = f"{row['bytes'] / 1e6:8.1f} MB", str(row["weights_sha256"])[:16]
            print(f"step {row['step']:>8}  whole  {size}  {row['layout']:<10}  weights {digest}  {row['path']}")
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
    single = stored.step_of(root) is not None or (root / stored.MANIFEST).exists()
    rows = []
    for folder in [root] if single else stored.candidates(root):
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
    if output.exists():
        raise SpecError(f"--output {output}", "exists already.", "Name a new file.")
    stored.check_files(found, hashes=True)
    beside = output.with_name(f".{output.name}.writing")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(found.path / MODEL, beside)
        beside.rename(output)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise CheckpointError(f"--output {output}", f"could not be written: {error.strerror}.") from error
    print(f"{output}: weights of step {found.step}, sha256 {found.manifest['weights_sha256'][:16]}")
    return 0
