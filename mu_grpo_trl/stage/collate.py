"""Tensors of one micro-batch, in one of three layouts: padded rows, bundles that share a prompt, one packed row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .reader import Response

LABEL_IGNORED = -100
PADDING_SEGMENT = -1


def collate(
    bundles: Sequence[Sequence[Response]], pad_token_id: int | None, packed: bool = False
) -> dict[str, torch.Tensor]:
    """Lay out the responses of a micro-batch.

    - A bundle of one response is a row of its prompt and completion, right-padded.
    - A bundle of several responses to one prompt is a row of the prompt without its last token (segment 0), then for
      each response the prompt's last token and the completion (segments 1, 2, …). Positions continue from the prompt
      in every segment, and a token sees segment 0 and its own: what it computes is what it would compute alone.
    - `packed`, all bundles of one response: the sequences follow each other in a single row without padding, and
      positions start anew in each, which is how attention of variable length tells them apart.

    Masks come from lengths, so any `pad_token_id` will do, EOS and None included. An empty micro-batch gives a dummy
    of one row and two tokens whose `completion_mask` is all False and whose labels are all −100: the rank forwards it
    to stay in step with the others, and its loss is exactly 0.

    Args:
        bundles (`Sequence[Sequence[Response]]`): of together B responses.
        pad_token_id (`int` or `None`): fills `input_ids`; None (a tokenizer without a pad token) fills with 0.
        packed (`bool`, defaults to `False`): lay all of it out in one row.

    Returns:
        `dict[str, torch.Tensor]`: with R rows, L the longest row and T the longest completion,
        - `input_ids` int64 `(R, L)`.
        - `labels` int64 `(R, L)`: the token itself where it is of a completion (the model shifts), −100 elsewhere.
        - `position_ids` int64 `(R, L)`: only where some row holds more than one response.
        - `segments` int64 `(R, L)`: only where a prompt is shared; −1 on padding.
        - `behavior_logps` float32 `(B, T)`: b_t; NaN where the engine gave none, 0 on padding.
        - `completion_mask` bool `(B, T)`: True on generated tokens, the EOS included.
        - `advantages` float32 `(B,)`.
        - `rows`, `columns` int64 `(B,)`: where the last prompt token of each response lies; its completion follows.
    """
    responses = [response for bundle in bundles for response in bundle]
    laid_out = [_lay_out(bundle) for bundle in bundles] or [_DUMMY]
    if packed:
        laid_out = [np.concatenate(laid_out, axis=1)]
    length = max(row.shape[1] for row in laid_out)
    table = np.empty((4, len(laid_out), length), dtype=np.int64)
    table[:] = np.array([pad_token_id or 0, LABEL_IGNORED, 0, PADDING_SEGMENT])[:, None, None]
    for number, row in enumerate(laid_out):
        table[:, number, : row.shape[1]] = row
    arrays = dict(zip(("input_ids", "labels", "position_ids", "segments"), table, strict=True))
    shares = any(len(bundle) > 1 for bundle in bundles)
    if not shares:
        del arrays["segments"]
    if not (shares or packed):
        del arrays["position_ids"]
    arrays |= _per_response(responses)
    arrays["rows"], arrays["columns"] = _places(bundles, packed)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def shared_prompt_mask(segments: torch.Tensor) -> torch.Tensor:
    """Attention mask bool `(R, 1, L, L)` of `segments` `(R, L)`: True where a token (row) may look (column)."""
    causal = torch.ones(segments.size(1), segments.size(1), dtype=torch.bool, device=segments.device).tril()
    same = segments[:, :, None] == segments[:, None, :]
    return (causal & (same | (segments == 0)[:, None, :]))[:, None]


# One row: tokens, labels, positions, segments.
_DUMMY = np.array([[0, 0], [LABEL_IGNORED, LABEL_IGNORED], [0, 1], [0, 0]])


def _lay_out(bundle: Sequence[Response]) -> np.ndarray:
    """int64 `(4, length)`: tokens, labels, positions and segments of a bundle."""
    prompt = np.asarray(bundle[0].prompt_ids, dtype=np.int64)
    start = len(prompt) - 1
    pieces = [_piece(prompt[:-1], start, 0, 0)]
    for number, response in enumerate(bundle, start=1):
        tokens = np.concatenate([prompt[-1:], response.completion_ids])
        pieces.append(_piece(tokens, 1, start, number if len(bundle) > 1 else 0))
    return np.concatenate(pieces, axis=1)


def _piece(tokens: np.ndarray, num_prompt_tokens: int, first_position: int, segment: int) -> np.ndarray:
    piece = np.empty((4, len(tokens)), dtype=np.int64)
    piece[0] = piece[1] = tokens
    piece[1, :num_prompt_tokens] = LABEL_IGNORED
    piece[2] = np.arange(first_position, first_position + len(tokens))
    piece[3] = segment
    return piece


def _per_response(responses: Sequence[Response]) -> dict[str, np.ndarray]:
    lengths = np.array([len(response.completion_ids) for response in responses] or [1])
    behavior_logps = np.zeros((len(lengths), int(lengths.max())), dtype=np.float32)
    for row, response in enumerate(responses):
        behavior_logps[row, : lengths[row]] = response.behavior_logps
    return {
        "behavior_logps": behavior_logps,
        "completion_mask": (np.arange(behavior_logps.shape[1]) < lengths[:, None]) & bool(responses),
        "advantages": np.array([response.advantage for response in responses] or [0.0], dtype=np.float32),
    }


def _places(bundles: Sequence[Sequence[Response]], packed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of the last prompt token of each response."""
    rows, columns, end = [], [], 0
    for number, bundle in enumerate(bundles):
        end = (end if packed else 0) + len(bundle[0].prompt_ids) - 1
        for response in bundle:
            rows.append(0 if packed else number)
            columns.append(end)
            end += 1 + len(response.completion_ids)
    return np.array(rows or [0]), np.array(columns or [0])
