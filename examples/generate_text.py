"""Let a trained byte model write: python examples/generate_text.py RUN_DIR --prompt "def " --tokens 200."""

import argparse
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from meshwright.errors import MeshwrightError
from meshwright.models.build import build_model
from meshwright.spec.load import from_table
from meshwright.train.stored import MODEL, newest_good
from meshwright.train.tokenizer import load_tokenizer


def load_run(folder: str) -> tuple[torch.nn.Module, object, int]:
    """The model of a run's newest good checkpoint, its tokenizer, and how many tokens it can see."""
    checkpoint, _ = newest_good(Path(folder), hashes=True)
    if checkpoint is None:
        sys.exit(f"{folder} holds no checkpoint")
    recipe = from_table(checkpoint.manifest["recipe"])
    tokenizer = load_tokenizer(recipe.data.tokenizer or "bytes")
    model = build_model(
        recipe.model, seq_len=recipe.data.seq_len, tokenizer_vocab=tokenizer.vocab_size, seed=recipe.train.seed
    )
    model.load_state_dict(load_file(checkpoint.path / MODEL), strict=False)  # a tied tensor is stored once
    return model.eval(), tokenizer, recipe.data.seq_len


@torch.no_grad()
def generate(model: torch.nn.Module, ids: list[int], count: int, seq_len: int, temperature: float) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        logits = model(torch.tensor([ids[-seq_len:]]))[0, -1]  # (vocab,)
        chosen = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)
        ids.append(int(chosen))
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir")
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.7)
    options = parser.parse_args()
    model, tokenizer, seq_len = load_run(options.run_dir)
    prompt = tokenizer.encode(options.prompt.encode()).tolist()
    print(tokenizer.decode(generate(model, prompt, options.tokens, seq_len, options.temperature)))


if __name__ == "__main__":
    try:
        main()
    except MeshwrightError as error:
        sys.exit(f"error: {error}")
