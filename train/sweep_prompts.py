"""The prompts of a sweep as token ids, in one file that a machine without the data sets can read.

    python -m train.sweep_prompts --target MODEL --seed 7 --out prompts.npz \
        --set gsm8k jsonl:train.jsonl 7000 --set arithmetic reasoning_gym:gcd,lcm 4000 --without heldout.npz
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.common import encode_prompt
from pipeline.config import DraftConfig, ModelsConfig
from pipeline.models import load_tokenizer
from pipeline.sources import load_prompts
from train.texts import Text, load_texts, save_texts

NOTHING = np.zeros(0, dtype=np.int32)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="train.sweep_prompts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--set", nargs=3, action="append", required=True, metavar=("NAME", "SOURCE", "LIMIT"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=int, default=256, help="leave out prompts of more tokens")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first prompts of every set")
    parser.add_argument("--without", nargs="*", default=[], type=Path, help="leave out the prompts of these files")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args(argv)
    try:
        tokenizer = load_tokenizer(ModelsConfig(target=args.target, draft=DraftConfig(keep_layers=1)))
        texts = []
        excluded = {tuple(text.prompt) for text in load_texts(args.without)}
        for name, source, limit in args.set:
            prompts = load_prompts(name, source, args.skip + int(limit), args.seed)[args.skip :]
            encoded = [encode_prompt(tokenizer, prompt.messages) for prompt in prompts]
            distinct = dict.fromkeys(tuple(ids) for ids in encoded if len(ids) <= args.longest)
            fitting = [np.array(ids, dtype=np.int32) for ids in distinct if ids not in excluded]
            texts += [Text(source=name, prompt=ids, completion=NOTHING) for ids in fitting]
            tokens = sum(map(len, fitting))
            print(f"{name}: {len(fitting)} of {len(prompts)} prompts are new and fit, {tokens} tokens")
    except ValueError as error:
        print(f"train.sweep_prompts: {error}", file=sys.stderr)
        return 2
    save_texts(args.out, texts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
