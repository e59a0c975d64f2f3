"""Train an EAGLE-3-style head on a frozen base model, and measure what it is accepted at by distance."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from realhw.drafters import vocabulary
from realhw.eagle3 import Eagle3Config, Eagle3Head, Keys, default_feature_layers, save_head
from realhw.eagle3_drafter import captured, decoder_layers
from realhw.models import Dtype, LoadedModel, load_model, text_config
from realhw.prompt_sets import Example, load_examples
from simulator.specs.base import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Spec
from traces.errors import InputError
from traces.schema import MAX_DRAFT_DISTANCE

Progress = Callable[[str, int, int], None]
IGNORED = -100
"""Token id of padding."""


class TrainOptions(Spec):
    """How a head is trained. `oasis-sim draft train` builds it from its flags."""

    model: str
    """The base: `smollm2-135m`, a .gguf file, a model folder or a Hugging Face name."""
    prompts: tuple[str, ...] = Field(min_length=1)
    """JSONL files of questions with answers (`realhw.prompt_sets`)."""
    held_out_share: Fraction = 0.1
    """Of the examples, by a hash of the question; acceptance is measured on these alone."""
    max_prompts: PositiveInt | None = None
    """Use the first so many of each split (after a seeded shuffle); null: all."""
    new_tokens: PositiveInt = 256
    """Generated per prompt."""
    sequence_tokens: PositiveInt = 512
    """Longer answers lose their end."""
    packed_tokens: PositiveInt = 2048
    """Sequences are joined up to this length, so that the head learns to attend far."""
    temperature: NonNegativeFloat = 0.7
    """Of the text that the base generates, and of the text on which acceptance is measured. 0: greedy."""
    reference_answers: bool = True
    """Also train on each question with its reference answer."""
    epochs: PositiveInt = 8
    max_seconds: PositiveFloat | None = None
    """Stop training after this long, whatever the epochs."""
    batch_sequences: PositiveInt = 4
    generate_sequences: PositiveInt = 256
    """Generated together."""
    learning_rate: PositiveFloat = 1e-3
    draft_vocab_size: PositiveInt | None = None
    """Own output matrix over the most frequent tokens; null: the base's output matrix, frozen."""
    distances: Annotated[int, Field(gt=0, le=MAX_DRAFT_DISTANCE, strict=True)] = 4
    distance_decay: Fraction = 0.8
    """Weight of the loss at distance j: decay^(j − 1). Source: EAGLE-3's published training code."""
    seed: NonNegativeInt = 0
    device: str = "cpu"
    dtype: Dtype = "float32"
    """Of the base."""
    command: str | None = None


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Of `num_positions` positions of generated text: share of right guesses by distance, and of right prefixes."""

    right: tuple[float, ...]
    prefix_right: tuple[float, ...]
    """All guesses up to the distance right: what speculative decoding would accept."""
    num_positions: int


def train(
    options: TrainOptions, out: Path, loaded: LoadedModel | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Train a head, write `out` (.safetensors) and beside it `<stem>.json`; returns what the JSON holds.

    The base generates on every training prompt; the head learns the base's distribution over the next tokens at
    `distances` positions, each from its own outputs at the positions before (EAGLE-3's training-time test).
    """
    report = progress or (lambda what, done, total: None)
    if out.suffix != ".safetensors":
        raise InputError(f"{out}: a head is written as .safetensors")
    _require_writable(out)
    report("loading the model", 0, 1)
    loaded = loaded or load_model(options.model, options.device, options.dtype)
    started = time.perf_counter()
    require_trainable(loaded, options)
    splits = split_examples(load_examples(options.prompts), options)
    positions = loaded.max_positions or options.packed_tokens
    longest = min(options.sequence_tokens, positions)
    torch.manual_seed(options.seed)
    sequences: list[list[int]] = []
    held_out: list[tuple[list[int], int]] = []
    for name, examples in splits.items():
        prompts = [_chat(loaded.tokenizer, example.question) for example in examples]
        for prompt, answer in zip(prompts, _generate(loaded, prompts, options, name, report), strict=True):
            tokens = (prompt + answer)[:longest]
            if name == "held out":
                held_out.append((tokens, len(prompt)))
            else:
                sequences.append(tokens)
        if name == "training" and options.reference_answers:
            sequences += [_chat(loaded.tokenizer, e.question, e.answer)[:longest] for e in examples]
    generated_s = time.perf_counter() - started
    if not any(known_positions(len(tokens), prompt, options.distances) for tokens, prompt in held_out):
        raise InputError(
            f"no held-out answer has {options.distances + 1} tokens within {longest}: acceptance cannot be measured; "
            "raise new_tokens or sequence_tokens"
        )
    sequences = packed([s for s in sequences if len(s) > 1], min(options.packed_tokens, positions), options.seed)
    head = new_head(loaded, options, sequences)
    losses = fit(head, loaded, sequences, options, report)
    report("measuring acceptance", 0, 1)
    acceptance = measure_acceptance(head, loaded, held_out, options.distances, options.batch_sequences)
    cuda = loaded.model.device.type == "cuda"
    summary: dict[str, Any] = {
        "model": loaded.geometry.name,
        "weights": loaded.weights,
        "acceptance_by_distance": [round(x, 4) for x in acceptance.right],
        "prefix_acceptance_by_distance": [round(x, 4) for x in acceptance.prefix_right],
        "held_out_prompts": len(held_out),
        "held_out_positions": acceptance.num_positions,
        "training_prompts": len(splits["training"]),
        "training_tokens": sum(map(len, sequences)),
        "steps": len(losses),
        "first_loss": round(losses[0], 4),
        "last_loss": round(float(np.mean(losses[-min(20, len(losses)) :])), 4),
        "generation_s": round(generated_s, 1),
        "total_s": round(time.perf_counter() - started, 1),
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "options": {**options.model_dump(mode="json"), "prompts": [Path(p).name for p in options.prompts]},
    }
    save_head(head, out)
    out.with_suffix(".json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return summary


def _require_writable(out: Path) -> None:
    """Raises InputError before a training whose head could not be written."""
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"{out}: cannot be written: {error.strerror}") from error


def require_trainable(loaded: LoadedModel, options: TrainOptions) -> None:
    """Raises InputError for a base without what a head is made of, and for a vocabulary larger than the base's."""
    decoder_layers(loaded.model)
    config = text_config(loaded.model)
    for name in ("hidden_size", "intermediate_size", "rms_norm_eps", "max_position_embeddings"):
        if getattr(config, name, None) is None:
            raise InputError(f"{loaded.geometry.name}: a head needs a model whose configuration has {name}")
    if options.draft_vocab_size is not None and options.draft_vocab_size > vocabulary(loaded.model):
        raise InputError(
            f"draft_vocab_size {options.draft_vocab_size} exceeds the base's {vocabulary(loaded.model)} tokens"
        )


def split_examples(examples: Sequence[Example], options: TrainOptions) -> dict[str, list[Example]]:
    """`training` and `held out`. Raises InputError where one of them is empty."""
    splits: dict[str, list[Example]] = {"training": [], "held out": []}
    order = np.random.default_rng(options.seed).permutation(len(examples))
    for index in order:
        splits["held out" if examples[index].held_out(options.held_out_share) else "training"].append(examples[index])
    for name, members in splits.items():
        if not members:
            raise InputError(f"held_out_share {options.held_out_share} leaves no {name} examples of {len(examples)}")
        splits[name] = members[: options.max_prompts]
    return splits


def packed(sequences: Sequence[list[int]], max_tokens: int, seed: int) -> list[list[int]]:
    """Sequences joined in a seeded order, each result at most `max_tokens` long unless one alone is longer."""
    out: list[list[int]] = []
    for index in np.random.default_rng(seed).permutation(len(sequences)):
        if out and len(out[-1]) + len(sequences[index]) <= max_tokens:
            out[-1] = out[-1] + sequences[index]
        else:
            out.append(list(sequences[index]))
    return out


def new_head(loaded: LoadedModel, options: TrainOptions, sequences: Sequence[Sequence[int]]) -> Eagle3Head:
    """A head of the base's own layer geometry, on its device in fp32; passes the base's last features through."""
    config = text_config(loaded.model)
    geometry = loaded.geometry
    rope = getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": config.rope_theta}
    head = Eagle3Head(
        Eagle3Config(
            hidden_size=config.hidden_size,
            target_hidden_size=config.hidden_size,
            num_attention_heads=geometry.num_query_heads,
            num_key_value_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            intermediate_size=config.intermediate_size,
            vocab_size=vocabulary(loaded.model),
            draft_vocab_size=options.draft_vocab_size,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(rope),
            feature_layers=default_feature_layers(geometry.num_layers),
        )
    )
    for parameter in head.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    torch.nn.init.normal_(head.get_parameter("midlayer.self_attn.o_proj.weight"), std=0.002)
    torch.nn.init.normal_(head.get_parameter("midlayer.mlp.down_proj.weight"), std=0.002)
    if head.lm_head is not None:
        counts = np.bincount(np.concatenate([np.asarray(s) for s in sequences]), minlength=head.config.vocab_size)
        chosen = np.sort(np.argsort(-counts, kind="stable")[: options.draft_vocab_size])
        head.get_buffer("d2t").copy_(torch.from_numpy(chosen - np.arange(len(chosen))))
        with torch.no_grad():
            head.lm_head.weight.copy_(loaded.model.get_output_embeddings().weight[torch.from_numpy(chosen)])
    return head.to(loaded.model.device)


def fit(
    head: Eagle3Head, loaded: LoadedModel, sequences: Sequence[Sequence[int]], options: TrainOptions, report: Progress
) -> list[float]:
    """Minimise the loss in place; returns it per step."""
    steps_per_epoch = math.ceil(len(sequences) / options.batch_sequences)
    total = steps_per_epoch * options.epochs
    trained = [p for p in head.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    started = time.perf_counter()
    losses: list[float] = []
    head.train()
    for step in range(total):
        spent = (time.perf_counter() - started) / options.max_seconds if options.max_seconds else 0.0
        if spent >= 1 and losses:
            break
        if step % steps_per_epoch == 0:
            batches = _batches(sequences, options.batch_sequences, options.seed + step)
        done = max(step / total, spent)
        rate = (
            options.learning_rate * min(1.0, (step + 1) / max(1, total // 50)) * (0.5 + 0.5 * math.cos(math.pi * done))
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        tokens = batches[step % steps_per_epoch].to(loaded.model.device)
        loss = training_loss(head, loaded.model, tokens, options.distances, options.distance_decay)
        if not loss.isfinite():
            raise InputError(
                f"training: the loss of step {step + 1} is not finite; learning_rate is {options.learning_rate:g}"
            )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        report("training", step + 1, total)
    head.eval()
    return losses


def training_loss(head: Eagle3Head, model: Any, tokens: Tensor, distances: int, decay: float) -> Tensor:
    """Cross entropy of the head against the base's distribution at distances 1 … `distances`, averaged over slots.

    tokens: int64 [B, S], padding IGNORED at the end. Each distance reads the right tokens and the head's own outputs.
    """
    cuda = tokens.device.type == "cuda"
    real = tokens != IGNORED
    ids = tokens.clamp(min=0)
    with torch.no_grad(), captured(model, head.config.feature_layers) as passes:
        base_logits = model(input_ids=ids, use_cache=False).logits
    targets = head.target_ids
    if targets is not None:
        base_logits = base_logits[..., targets]
    embed, output_matrix = model.get_input_embeddings(), model.get_output_embeddings()
    total = torch.zeros((), device=tokens.device)
    weights = 0.0
    with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
        features = head.features(passes[0].float())
        past: Keys = []
        for step in range(distances):
            # Slot i reads token i + 1 + step and is taught the base's distribution at that position.
            shift = 1 + step
            if ids.shape[1] <= shift:
                break
            following = functional.pad(ids[:, shift:], (0, shift))
            taught = functional.pad(real[:, shift:], (0, shift), value=False)
            features = head.unrolled(embed(following).detach().float(), features, step, past)
            logits = _frozen_logits(head, features, output_matrix)[:, :-shift][taught[:, :-shift]]
            wanted = base_logits[:, shift:][taught[:, :-shift]].float().softmax(dim=-1)
            loss = -(wanted * logits.float().log_softmax(dim=-1)).sum(dim=-1).mean()
            total = total + decay**step * loss
            weights += decay**step
    return total / weights


def measure_acceptance(
    head: Eagle3Head, loaded: LoadedModel, held_out: Sequence[tuple[list[int], int]], distances: int, batch: int
) -> Acceptance:
    """Greedy chains of every position of each (tokens, prompt length), against the tokens that really follow.

    Counted are the positions after the prompt that have a guess at every distance.
    """
    right = np.zeros(distances)
    prefix = np.zeros(distances)
    count = 0
    for start in range(0, len(held_out), batch):
        part = held_out[start : start + batch]
        guesses = chain_guesses(head, loaded, [tokens for tokens, _ in part], distances)
        for row, (tokens, prompt_tokens) in enumerate(part):
            hits, known = accepted(guesses[row], tokens, prompt_tokens)
            right += hits.sum(axis=0)
            prefix += np.logical_and.accumulate(hits, axis=1).sum(axis=0)
            count += known
    shares = [tuple(float(x) for x in counts / max(count, 1)) for counts in (right, prefix)]
    return Acceptance(shares[0], shares[1], count)


def known_positions(num_tokens: int, prompt_tokens: int, distances: int) -> range:
    """Positions whose guesses at every distance lie in the generated text."""
    return range(max(prompt_tokens - 1, 1), num_tokens - distances)


def accepted(guesses: np.ndarray[Any, np.dtype[np.int64]], tokens: Sequence[int], first: int) -> tuple[Any, int]:
    """Which guesses are right: bool [positions, distances], and the number of positions.

    guesses [S, distances]: row i, column j − 1 is the guess for token i + 1 + j, made when token i + 1 is known.
    Positions i + 1 run over first − 1 … S − 1 − distances, so that every guess of a row lies in the generated text.
    """
    distances = guesses.shape[1]
    known = np.array(known_positions(len(tokens), first, distances), dtype=np.int64)
    actual = np.asarray(tokens)[known[:, None] + np.arange(1, distances + 1)]
    return guesses[known - 1] == actual, len(known)


@torch.inference_mode()
def chain_guesses(
    head: Eagle3Head, loaded: LoadedModel, sequences: Sequence[Sequence[int]], distances: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """What the head would guess after each token, int64 [B, S, distances] (see `accepted`)."""
    model = loaded.model
    ids = _padded(sequences).to(model.device).clamp(min=0)
    with captured(model, head.config.feature_layers) as passes:
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    weight = head.fc.weight.dtype
    features = head.features(passes[0].to(weight))
    following = functional.pad(ids[:, 1:], (0, 1))
    past: Keys = []
    guesses = []
    for step in range(distances):
        features = head.unrolled(model.get_input_embeddings()(following).to(weight), features, step, past)
        following = head.choose(_frozen_logits(head, features, model.get_output_embeddings()))
        guesses.append(following.cpu().numpy())
    return np.stack(guesses, axis=-1)


def _frozen_logits(head: Eagle3Head, output: Tensor, base_output: Any) -> Tensor:
    """`Eagle3Head.logits` without gradients into the base's matrix."""
    frozen: Any = lambda rows: functional.linear(rows, base_output.weight.detach().to(rows.dtype))  # noqa: E731
    return head.logits(output, frozen)


def _chat(tokenizer: Any, question: str, answer: str | None = None) -> list[int]:
    """Token ids of a chat turn, with the reference answer or up to where the model answers."""
    if not getattr(tokenizer, "chat_template", None):
        return [int(t) for t in tokenizer(question if answer is None else f"{question} {answer}")["input_ids"]]
    messages = [{"role": "user", "content": question}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer is None)
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


@torch.inference_mode()
def _generate(
    loaded: LoadedModel, prompts: Sequence[list[int]], options: TrainOptions, name: str, report: Progress
) -> list[list[int]]:
    """The base's answers, up to and with its end-of-sequence token."""
    device, end = loaded.model.device, loaded.tokenizer.eos_token_id
    answers: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    _require_generable(loaded, prompts, options.new_tokens, name)
    for start in range(0, len(order), options.generate_sequences):
        chosen = order[start : start + options.generate_sequences]
        width = max(len(prompts[i]) for i in chosen)
        ids = torch.zeros(len(chosen), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(chosen):
            ids[row, width - len(prompts[i]) :] = torch.tensor(prompts[i])
            mask[row, width - len(prompts[i]) :] = 1
        sampling = {"do_sample": False} if options.temperature < torch.finfo(torch.float32).eps else {
            "do_sample": True, "temperature": options.temperature, "top_k": 0, "top_p": 1.0,
        }  # fmt: skip
        out = loaded.model.generate(
            input_ids=ids.to(device), attention_mask=mask.to(device), max_new_tokens=options.new_tokens,
            eos_token_id=end, pad_token_id=end, **sampling,
        )  # fmt: skip
        for row, i in enumerate(chosen):
            answer = out[row, width:].tolist()
            answers[i] = answer[: answer.index(end) + 1] if end in answer else answer
        report(f"generating text ({name})", start + len(chosen), len(order))
    return answers


def _require_generable(loaded: LoadedModel, prompts: Sequence[list[int]], new_tokens: int, name: str) -> None:
    """Raises InputError for questions without tokens or too long for the model, and logits that are not finite."""
    lengths = [len(prompt) for prompt in prompts]
    if not min(lengths):
        raise InputError(f"a question of the {name} examples has no tokens")
    if loaded.max_positions is not None and max(lengths) + new_tokens > loaded.max_positions:
        raise InputError(
            f"a question of {max(lengths)} tokens and new_tokens {new_tokens} exceed the {loaded.max_positions} "
            f"positions of {loaded.geometry.name}"
        )
    ids = torch.tensor([prompts[lengths.index(min(lengths))]], device=loaded.model.device)
    if loaded.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits.isnan().any():
        raise InputError(f"{loaded.geometry.name}: its logits are not finite")


def _batches(sequences: Sequence[Sequence[int]], size: int, seed: int) -> list[Tensor]:
    """Padded batches of similar lengths in a seeded order."""
    generator = np.random.default_rng(seed)
    jitter = generator.uniform(0.9, 1.1, len(sequences))
    order = np.argsort([len(s) * j for s, j in zip(sequences, jitter, strict=True)], kind="stable")
    groups = [[sequences[i] for i in order[start : start + size]] for start in range(0, len(order), size)]
    return [_padded(groups[i]) for i in generator.permutation(len(groups))]


def _padded(sequences: Sequence[Sequence[int]]) -> Tensor:
    out = torch.full((len(sequences), max(map(len, sequences))), IGNORED, dtype=torch.long)
    for row, tokens in enumerate(sequences):
        out[row, : len(tokens)] = torch.tensor(list(tokens))
    return out
