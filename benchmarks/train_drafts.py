"""The reference model's own text, and the draft heads trained on it.

    python benchmarks/train_drafts.py text --work F       the model answers 1,440 prompts
    python benchmarks/train_drafts.py features --work F   its last features of all of that
    python benchmarks/train_drafts.py medusa --work F     three heads on the features
    python benchmarks/train_drafts.py eagle --work F      one layer on features and tokens

Each step reads what the one before left in the folder F; a step that was stopped goes on where it
was. On two cores about 20, 5, 7 and 27 minutes. Seeded; another machine's rounding changes some
tokens, and the heads with them.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as nnf
from safetensors.torch import load_file, save_file
from torch import Tensor

from lecture_util.model import weights
from lecture_util.model.generate import generate
from lecture_util.model.sampling import GREEDY, Sampling
from lecture_util.model.tokenizer import chat
from lecture_util.model.train import IGNORE, train
from lecture_util.speculative.eagle import EagleHead
from lecture_util.speculative.medusa import MedusaHeads, medusa_loss
from lecture_util.speculative.prompts import training_prompts
from lecture_util.speculative.trained import ASSETS
from lecture_util.speculative.vocabulary import DraftVocabulary, frequent

B, PROMPTS, NEW, EOS = 120, 1_440, 192, 2
WARM = Sampling(temperature=0.7, top_p=0.95)
BATCHES = PROMPTS // B  # the last is held out
HEADS, RANKS, U = 3, 8, 8_192
PAD = -1


def write_text(work: Path) -> None:
    """Answers, batch by batch; every other batch greedy, since people decode both ways."""
    model, tokenizer = weights.load(), weights.load_tokenizer()
    prompts = [chat(tokenizer, prompt) for prompt in training_prompts(PROMPTS)]
    for batch in range(BATCHES):
        path = work / f"text-{batch:02d}.safetensors"
        if path.exists():
            continue
        part = sorted(prompts[batch * B : (batch + 1) * B], key=len)
        outputs = generate(
            model, part, NEW,
            sampling=GREEDY if batch % 2 else WARM, eos=EOS,
            generator=torch.Generator(model.device).manual_seed(batch),
        )  # fmt: skip
        rows = [prompt + output for prompt, output in zip(part, outputs, strict=True)]
        longest = max(map(len, rows))
        save_file(
            {
                "tokens": torch.tensor([row + [PAD] * (longest - len(row)) for row in rows]),
                "answer_from": torch.tensor([len(prompt) for prompt in part]),
            },
            path,
        )
        print(f"batch {batch}: {sum(map(len, outputs))} tokens", flush=True)


@torch.inference_mode()
def write_features(work: Path) -> None:
    model = weights.load()
    for batch in range(BATCHES):
        path = work / f"features-{batch:02d}.safetensors"
        if path.exists():
            continue
        tokens_BT = load_file(work / f"text-{batch:02d}.safetensors")["tokens"]
        parts = [model.features(part.clamp(min=0)).bfloat16() for part in tokens_BT.split(12)]
        save_file({"x": torch.cat(parts)}, path)
        print(f"batch {batch}", flush=True)


def rows_of(work: Path, batches: range) -> list[tuple[Tensor, Tensor, int]]:
    """(tokens_T, x_TD, first position of the answer) of each answer, without padding."""
    rows = []
    for batch in batches:
        text = load_file(work / f"text-{batch:02d}.safetensors")
        x_BTD = load_file(work / f"features-{batch:02d}.safetensors")["x"]
        for tokens, x_TD, start in zip(
            text["tokens"], x_BTD, text["answer_from"].tolist(), strict=True
        ):
            T = int((tokens != PAD).sum())
            rows.append((tokens[:T], x_TD[:T].float(), start))
    return rows


def vocabulary_of(model, rows) -> DraftVocabulary:
    return DraftVocabulary(
        model.head, frequent(torch.cat([row[0] for row in rows]), model.config.V, U)
    )


def save(model, head, vocabulary: DraftVocabulary, name: str, **facts) -> None:
    c = model.config
    facts |= {"config": {"D": c.D, "V": c.V, "L": c.L}, "date": time.strftime("%Y-%m-%d")}
    tensors = {key: value.bfloat16().contiguous() for key, value in head.state_dict().items()}
    tensors["ids"] = vocabulary.ids_U.to(torch.int32)
    ASSETS.mkdir(parents=True, exist_ok=True)
    save_file(tensors, ASSETS / f"{name}.safetensors", {"facts": json.dumps(facts)})


def medusa_examples(rows, vocabulary) -> tuple[Tensor, Tensor]:
    """Features and, for head k, the token k + 1 after the next one. -> x_MD, targets_MK."""
    xs, targets = [], []
    for tokens, x_TD, start in rows:
        padded = torch.cat((vocabulary.place_V[tokens], torch.full((HEADS,), -1)))
        at = torch.arange(start - 1, len(tokens) - 2)
        xs.append(x_TD[at])
        targets.append(torch.stack([padded[at + 2 + k] for k in range(HEADS)], dim=1))
    targets_MK = torch.cat(targets)
    return torch.cat(xs), targets_MK.masked_fill(targets_MK < 0, IGNORE)


def train_medusa(work: Path, epochs: int = 4, batch: int = 1024) -> None:
    model = weights.load()
    rows = rows_of(work, range(BATCHES - 1))
    vocabulary = vocabulary_of(model, rows)
    x_MD, targets_MK = medusa_examples(rows, vocabulary)
    torch.manual_seed(0)
    heads = MedusaHeads(model.config.D, HEADS)

    def new_batch(generator):
        at = torch.randint(len(x_MD), (batch,), generator=generator)
        return x_MD[at], targets_MK[at]

    def loss_of(heads, x, targets):
        with torch.autocast("cpu", torch.bfloat16):
            return medusa_loss(heads, vocabulary, x, targets)

    start = time.perf_counter()
    steps = epochs * len(x_MD) // batch
    losses = train(heads, new_batch, steps, lr=1e-3, loss_of=loss_of, label="medusa")
    heads.eval()
    x_MD, targets_MK = medusa_examples(rows_of(work, range(BATCHES - 1, BATCHES)), vocabulary)
    with torch.inference_mode():
        ranks_MKR = vocabulary(heads(x_MD)).topk(RANKS).indices
    # A token outside the draft's vocabulary counts as missed.
    right_KR = (ranks_MKR == targets_MK[..., None]).float().mean(0)
    print("right by head and rank", right_KR, "loss", sum(losses[-20:]) / 20)
    save(
        model, heads, vocabulary, "medusa",
        accuracy=right_KR.tolist(), examples=len(x_MD), steps=steps,
        seconds=round(time.perf_counter() - start),
    )  # fmt: skip


def eagle_loss(head, vocabulary, model, tokens_BT, x_BTD, scored_BT, unrolls: int = 2) -> Tensor:
    """The guess for the next-but-one token against the target's own distribution of it, and the
    feature itself. The second time round the layer reads its own predictions, as when drafting."""
    e_BTD = model.embed(tokens_BT.clamp(min=0))
    total, given_BTD = 0.0, x_BTD[:, :-1]
    for unroll in range(unrolls):
        out_BTD = head(given_BTD, e_BTD[:, 1 + unroll :])
        at = scored_BT[:, 1 + unroll :]
        out_MD, x_MD = out_BTD[at], x_BTD[:, 1 + unroll :][at]
        wanted_MU = vocabulary(x_MD).float().softmax(-1)
        guess_MU = vocabulary(out_MD).float()
        total = total + nnf.cross_entropy(guess_MU, wanted_MU)
        total = total + nnf.smooth_l1_loss(out_MD.float(), x_MD)
        given_BTD = out_BTD[:, :-1]
    return total / unrolls


def train_eagle(work: Path, epochs: float = 6, batch: int = 12, lr: float = 1e-3) -> None:
    model = weights.load()
    rows = rows_of(work, range(BATCHES - 1))
    vocabulary = vocabulary_of(model, rows)
    torch.manual_seed(0)
    head = EagleHead(model.config)

    def gather(picked):
        T = max(len(rows[i][0]) for i in picked)
        tokens_BT = torch.full((len(picked), T), PAD)
        x_BTD = torch.zeros(len(picked), T, model.config.D)
        scored_BT = torch.zeros(len(picked), T, dtype=torch.bool)
        for b, i in enumerate(picked):
            tokens, x_TD, start = rows[i]
            tokens_BT[b, : len(tokens)], x_BTD[b, : len(tokens)] = tokens, x_TD
            scored_BT[b, start : len(tokens) - 1] = True
        return tokens_BT, x_BTD, scored_BT

    def new_batch(generator):
        return gather(torch.randint(len(rows), (batch,), generator=generator).tolist())

    def loss_of(head, *parts):
        with torch.autocast("cpu", torch.bfloat16):
            return eagle_loss(head, vocabulary, model, *parts)

    start = time.perf_counter()
    steps = int(epochs * len(rows) / batch)
    losses = train(
        head, new_batch, steps, lr=lr, loss_of=loss_of, label="eagle",
        every=lambda i, loss: i % 25 or print(i, round(loss, 3), flush=True),
    )  # fmt: skip
    save(
        model, head, vocabulary, "eagle",
        rows=len(rows), steps=steps, loss=sum(losses[-20:]) / 20,
        seconds=round(time.perf_counter() - start),
    )  # fmt: skip


STEPS = {
    "text": write_text,
    "features": write_features,
    "medusa": train_medusa,
    "eagle": train_eagle,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    STEPS[args.step](args.work)


if __name__ == "__main__":
    main()
