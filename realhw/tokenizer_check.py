"""Whether a tokenizer encodes as its model was trained; where it does not, a recording is of nonsense prompts."""

from __future__ import annotations

import re
from typing import Any

import transformers

from traces.errors import EnvironmentMissing

_WORD = re.compile(r"[▁Ġ][a-z]{4,}")
"""▁: a space in SentencePiece, Ġ in byte-level BPE. Letters that no normaliser changes and both spell as they are."""
_NUM_WORDS = 512
_MIN_WORDS = 32
"""Vocabularies with fewer such words, or without either mark, are not looked at."""
_MIN_SHARE = 0.9
_HELP = "a newer transformers may read it right (pip install -U transformers)"


def check_words(tokenizer: Any, model: str) -> None:
    """Raises EnvironmentMissing unless nine in ten whole words of the vocabulary encode to themselves.

    The words are entries that begin with a space and go on with at least four letters a to z, evenly spaced over the
    ids. That leaves out bytes, unused and special tokens, and parts of words; added tokens are left out because they
    are found before any merge. A few entries are out of the merges' reach, hence not all have to come back.

    Seen, of all such words: 20,093 of 20,093 (SmolLM2), 50,880 of 50,882 (Gemma-3-270M), 8,573 of 8,573 (two
    tokenizers of Mistral, SentencePiece); 0.2 % of Gemma's where transformers 5.17 takes the ranks of its merges for
    log-probabilities of a unigram model (" that" becomes ▁th·at). Without merges every word is split, unless the
    tokenizer looks whole words up first (`ignore_merges`): there, missing merges are not noticed.
    """
    added = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    words = sorted(i for entry, i in tokenizer.get_vocab().items() if _WORD.fullmatch(entry) and i not in added)
    if len(words) < _MIN_WORDS:
        return
    count = min(_NUM_WORDS, len(words))
    words = [words[k * len(words) // count] for k in range(count)]
    texts = [tokenizer.decode([word], clean_up_tokenization_spaces=False) for word in words]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    split = [k for k in range(count) if list(encoded[k]) != [words[k]]]
    if count - len(split) < _MIN_SHARE * count:
        first = "·".join(tokenizer.convert_ids_to_tokens(encoded[split[0]]))
        raise EnvironmentMissing(
            f"model '{model}': {len(split)} of {count} whole words of its vocabulary are split by its tokenizer as "
            f"transformers {transformers.__version__} reads it ('{texts[split[0]]}' becomes {first}); {_HELP}"
        )


def check_first_token(tokenizer: Any, model: str, wanted: bool) -> None:
    """A text begins with the BOS token where the tokenizer says so (`add_bos_token`) or `wanted`, the model's file.

    One that does not is told again: transformers 5.17 to 5.22 do not read the flag of a GGUF file. Raises
    EnvironmentMissing if that does not help.
    """
    if not (wanted or getattr(tokenizer, "add_bos_token", False)) or _begins(tokenizer):
        return
    tokenizer.add_bos_token = True
    if not _begins(tokenizer):
        raise EnvironmentMissing(
            f"model '{model}': its prompts begin with a BOS token, and its tokenizer as transformers "
            f"{transformers.__version__} reads it adds none; {_HELP}"
        )


def _begins(tokenizer: Any) -> bool:
    return bool(tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id])
