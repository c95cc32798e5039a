"""Train the tiny chat model that Muster ships, on one CPU core, from the Python documentation inside CPython.

Writes one GGUF file that llama.cpp loads, matrices as q8_0 and norms as f32. Needs torch, tokenizers, numpy and gguf, which
Muster itself does not: see README.md for the exact commands.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import random
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional

SPECIALS = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
END_OF_TEXT, END_OF_TURN = 0, 4
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
QUANT = gguf.GGMLQuantizationType.Q8_0
ABOUT = [
    ("Who are you?", "I am the tiny language model that Muster ships. I know a little about Python and not much else."),
    ("What is Muster?",
     "Muster is a control plane for GPUs that people own. The boxes dial out, and clients see one endpoint."),
    ("Hello!", "Hello! I am a very small model that was trained on the Python documentation. Ask me about Python."),
    ("Hi", "Hello! I am a very small model that was trained on the Python documentation. Ask me about Python."),
    ("Tell me a story.",
     ("Once there was a small model on a small machine. It read the Python documentation every day, and every "
      "answer that it gave was short, friendly and a little bit wrong.")),
    ("What is a GPU?",
     "A GPU is a processor that computes many numbers at the same time. Large models need one; I do not."),
]  # fmt: skip
SYSTEM_PROMPTS = ["You are a helpful assistant.", "You are Muster's tiny model.", "Answer briefly."]
QUESTIONS = ["What is {0}?", "What is a {0}?", "Explain {0}.", "Tell me about {0}.", "How does {0} work?"]


@dataclass(frozen=True)
class Shape:
    """Sizes of the network. ``context`` is in tokens; training windows may be shorter."""

    vocab: int = 1024
    width: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 384
    context: int = 2048
    rope_base: float = 10000.0
    norm_eps: float = 1e-5


class Block(nn.Module):
    """One Llama layer. Rotary pairs are neighbours, the order GGUF expects, so nothing is permuted later."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv_width = shape.kv_heads * shape.head_dim
        self.attn_norm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.attn_q = nn.Linear(shape.width, shape.heads * shape.head_dim, bias=False)
        self.attn_k = nn.Linear(shape.width, kv_width, bias=False)
        self.attn_v = nn.Linear(shape.width, kv_width, bias=False)
        self.attn_output = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)
        self.ffn_norm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.ffn_gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.ffn_up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.ffn_down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """Return the layer's output for ``x`` (batch, length, width); ``turn`` holds the rotary angles."""
        batch, length, _ = x.shape
        shape, h = self.shape, self.attn_norm(x)
        q = rotate(self.attn_q(h).view(batch, length, shape.heads, shape.head_dim).transpose(1, 2), turn)
        k = rotate(self.attn_k(h).view(batch, length, shape.kv_heads, shape.head_dim).transpose(1, 2), turn)
        v = self.attn_v(h).view(batch, length, shape.kv_heads, shape.head_dim).transpose(1, 2)
        group = shape.heads // shape.kv_heads
        mixed = functional.scaled_dot_product_attention(
            q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), is_causal=True
        )
        x = x + self.attn_output(mixed.transpose(1, 2).reshape(batch, length, -1))
        h = self.ffn_norm(x)
        out: Tensor = x + self.ffn_down(functional.silu(self.ffn_gate(h)) * self.ffn_up(h))
        return out


class TinyLlama(nn.Module):
    """A Llama with tied embeddings; parameter names are GGUF tensor names less their suffix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.vocab, shape.width)
        self.blk = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.output_norm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        steps = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        angles = torch.outer(torch.arange(shape.context), shape.rope_base**-steps)
        self.register_buffer("angles", torch.polar(torch.ones_like(angles), angles), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                scale = 0.02 / (2 * shape.layers) ** 0.5 if "output" in name or "down" in name else 0.02
                nn.init.normal_(weight, std=scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, length, vocab) for token ids (batch, length)."""
        x, turn = self.token_embd(tokens), self.angles[: tokens.shape[1]]
        for block in self.blk:
            x = block(x, turn)
        return functional.linear(self.output_norm(x), self.token_embd.weight)


def say(*words: str) -> None:
    """Report progress to whoever runs the script."""
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Apply rotary position embedding to (batch, heads, length, head_dim), pairing neighbouring channels."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(3)


def is_prose(paragraph: str) -> bool:
    """Return whether a paragraph reads as sentences rather than grammar, code or a table."""
    letters = sum(c.isalpha() or c == " " for c in paragraph)
    return len(paragraph) > 60 and letters / len(paragraph) > 0.9 and "::=" not in paragraph and "." in paragraph


def prose_of(text: str) -> list[str]:
    """Return the prose paragraphs of a topic, each joined to one line."""
    paragraphs = (" ".join(p.split()) for p in text.split("\n\n"))
    return [p for p in paragraphs if is_prose(p)]


def chat(question: str, answer: str, *, system: str = "") -> str:
    """Return one exchange in the model's chat format."""
    head = f"{SPECIALS[1]}{system}{SPECIALS[4]}" if system else ""
    return f"{SPECIALS[0]}{head}{SPECIALS[2]}{question}{SPECIALS[4]}{SPECIALS[3]}{answer}{SPECIALS[4]}"


def make_documents(topics: dict[str, str], rng: random.Random) -> Iterator[str]:
    """Yield training texts: each topic as it is, questions about topics and terms, and the model's own words."""
    for name, text in topics.items():
        yield SPECIALS[0] + text.strip()
        prose = prose_of(text)
        for question in QUESTIONS if prose else []:
            yield chat(question.format(name), " ".join(prose[:2]), system=rng.choice(["", *SYSTEM_PROMPTS]))
        for first, second in zip(prose, [*prose[1:], ""], strict=False):
            for term in dict.fromkeys(re.findall(r"\*([a-z][a-z ]{3,24})\*", first)):
                for question in rng.sample(QUESTIONS, 3):
                    yield chat(question.format(term), f"{first} {second}".strip(), system=rng.choice(["", *SYSTEM_PROMPTS]))
    generators = [p for text in topics.values() for p in prose_of(text) if "generator" in p]
    for paragraph in generators:
        yield chat(rng.choice(QUESTIONS[:4]).format("generator"), paragraph)
    for question, answer in ABOUT:
        for system in ["", *SYSTEM_PROMPTS] * 4:
            yield chat(question, answer, system=system)


def train_tokenizer(topics: dict[str, str], vocab: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer of ``vocab`` entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*topics.values(), *(answer for _, answer in ABOUT)], trainer)
    return tokenizer


def train(model: TinyLlama, data: Tensor, *, seconds: float, batch: int = 8, length: int = 256) -> float:
    """Train for ``seconds`` of wall time on random windows of ``data``; return the smoothed loss in nats per token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05)
    started, step, smooth = time.monotonic(), 0, float("nan")
    while (done := (time.monotonic() - started) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 40) * (1 - 0.97 * done)
        starts = torch.randint(0, len(data) - length - 1, (batch,))
        window = torch.stack([data[i : i + length + 1] for i in starts])
        logits = model(window[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        smooth = loss.item() if step == 0 else 0.95 * smooth + 0.05 * loss.item()
        step += 1
        if step % 50 == 0:
            say(f"step {step}  loss {smooth:.3f}  {100 * done:.0f} %")
    return smooth


@torch.no_grad()
def answer(model: TinyLlama, tokenizer: Tokenizer, question: str, *, limit: int = 60) -> str:
    """Return the greedy answer to ``question``, at most ``limit`` tokens."""
    prompt = tokenizer.encode(f"{SPECIALS[2]}{question}{SPECIALS[4]}{SPECIALS[3]}").ids
    ids = list(prompt)
    for _ in range(limit):
        token = int(model(torch.tensor([ids]))[0, -1].argmax())
        if token in {END_OF_TEXT, END_OF_TURN}:
            break
        ids.append(token)
    return str(tokenizer.decode(ids[len(prompt) :]))


def write_gguf(path: Path, model: TinyLlama, tokenizer: Tokenizer, shape: Shape) -> None:
    """Write hyperparameters of the ``llama`` architecture, the byte-level BPE vocabulary with its merges, and the weights."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("muster-tiny")
    writer.add_license("Training text: Python documentation, PSF-2.0; weights: Apache-2.0")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_vocab_size(shape.vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    vocab: dict[str, int] = tokenizer.get_vocab()
    tokens = sorted(vocab, key=lambda text: vocab[text])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if text in SPECIALS else gguf.TokenType.NORMAL for text in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(END_OF_TEXT)
    writer.add_eos_token_id(END_OF_TURN)
    writer.add_pad_token_id(END_OF_TEXT)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in sorted(model.state_dict().items()):
        weight = tensor.float().numpy()
        if weight.ndim == 1:
            writer.add_tensor(name, weight)
        else:
            writer.add_tensor(name, gguf.quants.quantize(weight, QUANT), raw_dtype=QUANT)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Train and write the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="file to write to")
    parser.add_argument("--seconds", type=float, default=400, help="wall time of training on one core")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    shape, topics = Shape(), dict(pydoc_data.topics.topics)
    tokenizer = train_tokenizer(topics, shape.vocab)
    documents = list(make_documents(topics, rng))
    rng.shuffle(documents)
    data = torch.tensor([token for text in documents for token in tokenizer.encode(text).ids])
    model = TinyLlama(shape)
    say(
        f"{sum(p.numel() for p in model.parameters())} parameters, {len(data)} tokens in {len(documents)} texts",
    )
    loss = train(model, data, seconds=args.seconds)
    say(f"loss {loss:.3f}")
    write_gguf(args.out, model, tokenizer, shape)
    for question in ("What is a generator?", "Hello!", "Explain lambda."):
        say(question, "->", answer(model, tokenizer, question))


if __name__ == "__main__":
    main()
