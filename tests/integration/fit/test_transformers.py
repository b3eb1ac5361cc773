"""Claims about Hugging Face's models: ranks, micro-batches and batch sizes do not change what they learn."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from fitting import everywhere, flat, seeded
from lazy import LazyModule
from refusals import warning_texts
from torch import Tensor, nn

import cyxtrain as cx

transformers: Any = LazyModule("transformers", optional=True)
pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("rank_server")]

ROWS, LENGTH, WORDS, EFFECTIVE, EPOCHS = 21, 10, 23, 8, 2
SMALL = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
BERT = {**SMALL, "num_attention_heads": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def make_model(kind: str) -> nn.Module:
    with seeded():
        if kind == "gpt2":
            config = transformers.GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=1, n_head=2)
            config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
            return transformers.GPT2LMHeadModel(config)
        if kind == "llama":
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_attention_heads=2))
        if kind == "bert masked":
            return transformers.BertForMaskedLM(transformers.BertConfig(**BERT))
        return transformers.BertForSequenceClassification(transformers.BertConfig(**BERT, num_labels=3))


def make_data(kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(1, WORDS, (ROWS, LENGTH), generator=generator)
    labels, mask = words.clone(), torch.ones_like(words)
    for row in range(ROWS):
        labels[row, 2 + 3 * row % 8 :] = -100
        mask[row, 2 + 3 * row % 8 :] = 0
    labels[[1, 3, 5, 7, 8, 9]] = -100  # in batch 0 rank 1 of 2 has nothing to count, in batch 1 a micro-batch
    classes = torch.arange(ROWS) % 3
    return {"input_ids": words, "attention_mask": mask}, {"labels": classes if kind == "bert" else labels}


def fit_all(accumulation_steps: int) -> dict[str, Any]:
    found = {}
    for kind in ("gpt2", "llama", "bert masked", "bert"):
        model, data = make_model(kind).double(), make_data(kind)
        trainer = cx.DistributedTrainer(model, None, torch.optim.SGD(model.parameters(), 0.2))
        with warning_texts() as caught:
            if kind != "bert masked" or accumulation_steps * cx.get_world_size() == 1:
                settings = {"effective_batch_size": EFFECTIVE, "accumulation_steps": accumulation_steps}
                trainer.fit(*data, epochs=EPOCHS, shuffle=False, verbose=False, **settings)
        found[kind] = {
            "parameters": flat(model.parameters()),
            "evaluations": [trainer.evaluate(*data, batch_size=size).loss for size in (1, 4, 96)],
            "warnings": [text for text in caught if "the loss" in text],
        }
    return found


@functools.cache
def by_hand(kind: str) -> tuple[Any, float]:
    model, (inputs, targets) = make_model(kind).double(), make_data(kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    for _, first in itertools.product(range(EPOCHS), range(0, ROWS, EFFECTIVE)):
        batch = {name: part[first : first + EFFECTIVE] for name, part in {**inputs, **targets}.items()}
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    return flat(model.parameters()), model(**inputs, **targets).loss.item()


@pytest.mark.parametrize("accumulation_steps", [1, 4])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_language_models_and_classifiers_learn_what_one_big_batch_teaches(world_size, accumulation_steps):
    for found in everywhere(world_size, fit_all, accumulation_steps):
        for kind in ("gpt2", "llama", "bert"):
            parameters, loss = by_hand(kind)
            np.testing.assert_allclose(found[kind]["parameters"], parameters, rtol=0, atol=1e-6)
            assert found[kind]["evaluations"] == [pytest.approx(loss, abs=1e-6)] * 3
            assert found[kind]["warnings"] == []


def test_a_model_that_ignores_the_number_is_a_warning():
    (found,) = everywhere(1, fit_all, 1)
    (words,) = found["bert masked"]["warnings"]
    assert "not a mean over samples" in words
    assert "give a loss_fn that does it from the outputs" in words
