"""Reward models: sequence classification models as reward functions, scored as TRL does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl.data_utils import apply_chat_template, is_conversational

from ..rollout.transformers_engine import whole_models


class ModelReward:
    """
    A sequence classification model as a reward function: the logit of its one label on prompt and completion.

    Args:
        model (`str` or `torch.nn.Module`):
            Model id or path, or the model. It stays on its device and is put into evaluation mode.
        processing_class (`PreTrainedTokenizerBase`, *optional*):
            Its tokenizer; loaded by the model's name without.
        chat_template_kwargs (`dict`, *optional*):
            For the chat template of conversational prompts.
    """

    def __init__(self, model: Any, processing_class: Any = None, chat_template_kwargs: dict[str, Any] | None = None):
        if isinstance(model, str):
            with whole_models():
                model = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
        self.__name__ = model.config._name_or_path.split("/")[-1]
        tokenizer = processing_class or AutoTokenizer.from_pretrained(model.config._name_or_path)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        # The model reads its reward at the last token that is not padding.
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        self._model, self._tokenizer = model.eval(), tokenizer
        self._chat_template_kwargs = chat_template_kwargs or {}

    def to_device(self, device: torch.device) -> None:
        """Move the model to `device`."""
        self._model.to(device)

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> torch.Tensor:
        """Rewards `(n,)`."""
        texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        if is_conversational({"prompt": prompts[0]}):
            texts = [
                apply_chat_template({"messages": messages}, self._tokenizer, **self._chat_template_kwargs)["text"]
                for messages in texts
            ]
        inputs = self._tokenizer(
            text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        device = next(self._model.parameters()).device
        return self._model(**{name: tensor.to(device) for name, tensor in inputs.items()}).logits[:, 0].float()
