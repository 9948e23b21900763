"""
`LLM.generate` in a process of vLLM's interpreter, for `rollout_client`; imports nothing of this project.

    python vllm_in_process.py '{"model": …, "prompts": [[…]], "llm": {…}, "sampling": {…}}'

Each line on stdin makes it answer all prompts once and print `RESULT` with the seconds, tokens and responses.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.loads(sys.argv[1])
    llm = LLM(job["model"], **job["llm"])
    sampling = SamplingParams(**job["sampling"])
    prompts: Any = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    print("RESULT", json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        responses = [response for output in outputs for response in output.outputs]
        assert all(len(response.logprobs) == len(response.token_ids) for response in responses)
        tokens = sum(len(response.token_ids) for response in responses)
        result = {"seconds": seconds, "tokens": tokens, "responses": len(responses)}
        print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
