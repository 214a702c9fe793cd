"""LLM: the offline interface. Prompts in, finished outputs back, in the order of the prompts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pico_vllm.config import EngineConfig
from pico_vllm.engine.llm_engine import LLMEngine
from pico_vllm.errors import RequestError
from pico_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from pico_vllm.engine.input_processor import Prompt
    from pico_vllm.outputs import RequestOutput


class LLM:
    """An engine for a batch of prompts; for one thread at a time.

    Args:
        model: a directory, a .gguf file or a hub id (owner/name); None = SmolLM2-135M-Instruct, fetched once.
        progress: called with (phase, done, total) while the model is fetched and loaded.
        options: any field of ``EngineConfig`` and its groups (dtype, block_size, max_num_seqs, …).

    Raises:
        ConfigError, WeightLoadError: an option is wrong, or the model cannot be had, read or run here.

    Example:
        >>> llm = LLM()
        >>> llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].text
    """

    def __init__(
        self, model: str | None = None, *, progress: Callable[[str, int, int], None] | None = None, **options: Any
    ) -> None:
        self.engine = LLMEngine(EngineConfig.from_options(model=model, **options), progress=progress)
        self._request_ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: one prompt or several; each is text, a list of token ids, or {"prompt_token_ids": ids}.
            sampling_params: one for all prompts, one for each, or None for the checkpoint's own defaults.
            use_tqdm: show a progress bar on stderr.

        Returns:
            One finished output a prompt, in the order of the prompts.

        Raises:
            RequestError: a prompt or its parameters are wrong; names the prompt's index. Nothing has run then.
        """
        prompt_list = _as_prompts(prompts)
        params_list = self._as_params(sampling_params, len(prompt_list))
        request_ids: list[str] = []
        try:
            self._add_all(prompt_list, params_list, request_ids)
            finished = self._run(set(request_ids), use_tqdm)
        except BaseException:  # Ctrl-C included: whatever happens, no request stays behind
            for request_id in request_ids:
                self.engine.abort(request_id)
            raise
        return [finished[request_id] for request_id in request_ids]

    def _add_all(
        self, prompts: Sequence[Prompt], params_list: Sequence[SamplingParams], request_ids: list[str]
    ) -> None:
        """Queue all prompts; ``request_ids`` grows as they are added, so that the caller can abort them."""
        for index, (prompt, params) in enumerate(zip(prompts, params_list, strict=True)):
            request_id = f"generate-{next(self._request_ids)}"
            request_ids.append(request_id)
            try:
                self.engine.add_request(request_id, prompt, params)
            except RequestError as error:
                raise RequestError(f"prompt {index}: {error}" if len(prompts) > 1 else str(error)) from None

    def _run(self, pending: set[str], use_tqdm: bool) -> dict[str, RequestOutput]:
        from tqdm import tqdm

        finished: dict[str, RequestOutput] = {}
        num_tokens = 0
        with tqdm(total=len(pending), desc="Generating", unit="prompt", disable=not use_tqdm) as bar:
            while pending:
                for delta in self.engine.step():
                    num_tokens += len(delta.new_token_ids)
                    if delta.final is not None and delta.request_id in pending:
                        pending.remove(delta.request_id)
                        finished[delta.request_id] = delta.final
                        bar.update()
                if use_tqdm and (elapsed := bar.format_dict["elapsed"]):
                    bar.set_postfix_str(f"{num_tokens / elapsed:.1f} tok/s", refresh=False)
        return finished

    def _as_params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if params is None:
            params = self.engine.default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * num_prompts
        if not isinstance(params, Sequence):
            raise RequestError(f"sampling_params must be SamplingParams or a list, got {type(params).__name__}")
        if len(params) != num_prompts:
            raise RequestError(f"{len(params)} sampling_params for {num_prompts} prompts: give one, or one for each")
        return list(params)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt (text, a mapping, or a flat list of ids) becomes a list of one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(
            f"prompts must be text, token ids or a list of them, got {type(prompts).__name__}: make it a list"
        )
    if len(prompts) and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
