"""One other engine in a process of its own, with the packages of its own environment.

    <python of the engine> _engine_peers.py vllm | openvino | llama  MODEL  THREADS

MODEL is a directory that `save_pretrained` wrote. On each line of its input the process expects a
list of [prompt as token ids, number of tokens to make]. It serves them all at once, greedily, and
answers with a line: {"seconds": ..., "tokens": [[...], ...]}. This file imports nothing of quire.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

Work = list[tuple[list[int], int]]
Serve = Callable[[Work], list[list[int]]]


def vllm(model: Path, threads: int) -> Serve:
    """VLLM's build for CPUs, in float32."""
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="2",
        VLLM_CPU_OMP_THREADS_BIND=f"0-{threads - 1}",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
    )
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(model),
        dtype="float32",
        max_model_len=1024,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
    )

    def serve(work: Work) -> list[list[int]]:
        wanted = [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            for _, count in work
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in work]
        return [
            list(one.outputs[0].token_ids)
            for one in engine.generate(prompts, wanted, use_tqdm=False)
        ]

    return serve


def openvino(model: Path, threads: int) -> Serve:
    """OpenVINO GenAI in float32. The model is exported once, beside itself."""
    import numpy as np
    import openvino_genai
    from openvino import Tensor

    exported = model.with_name(model.name + "-openvino")
    if not exported.exists():
        from optimum.intel import OVModelForCausalLM

        OVModelForCausalLM.from_pretrained(model, export=True, load_in_8bit=False).save_pretrained(
            exported
        )
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = 2, False
    precision = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    engine = openvino_genai.ContinuousBatchingPipeline(
        str(exported), scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads, **precision}, {}
    )

    def serve(work: Work) -> list[list[int]]:
        prompts = [Tensor(np.array([prompt])) for prompt, _ in work]
        wanted = [
            openvino_genai.GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False)
            for _, count in work
        ]
        return [one.m_generation_ids[0] for one in engine.generate(prompts, wanted)]

    return serve


def write_gguf(model: Path, path: Path) -> None:
    """Write a model of the Llama family as a GGUF file in float16, with a made-up vocabulary."""
    import gguf
    import numpy as np
    from safetensors import safe_open

    config = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("llama")  # llama.cpp's server needs one; prompts are token ids
    writer.add_token_list([f"<{token}>" for token in range(config["vocab_size"])])
    writer.add_token_scores([0.0] * config["vocab_size"])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    with safe_open(model / "model.safetensors", "numpy") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - this is no dict
            values = tensors.get_tensor(name)
            for part, count in ("q_proj", heads), ("k_proj", kv_heads):
                if f".{part}." in name:  # halves of a head that rotate lie in pairs there
                    rows = values.reshape(count, 2, -1, values.shape[1])
                    values = rows.swapaxes(1, 2).reshape(values.shape)
            dtype = np.float16 if values.ndim > 1 else np.float32
            writer.add_tensor(names.get_name(name, (".weight",)), values.astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama(model: Path, threads: int) -> Serve:
    """llama.cpp with weights in float16, by way of xllamacpp, which is its server in a process."""
    import xllamacpp

    path = model.with_name(model.name + "-f16.gguf")
    if not path.exists():
        write_gguf(model, path)
    options = xllamacpp.CommonParams()
    options.model.path = str(path)
    options.n_ctx, options.n_parallel, options.kv_unified = 16 * 1024, 16, True
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
    options.cache_prompt, options.warmup, options.verbosity = False, False, 0
    engine = xllamacpp.Server(options)

    def one(prompt: list[int], count: int) -> list[int]:
        answer = engine.handle_completions(
            {
                "prompt": prompt,
                "n_predict": count,
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": False,
            }
        )
        return [int(token) for token in re.findall(r"<(\d+)>", answer["choices"][0]["text"])]

    async def all_of(work: Work) -> list[list[int]]:
        return await asyncio.gather(*(asyncio.to_thread(one, *request) for request in work))

    return lambda work: asyncio.run(all_of(work))


def main() -> None:
    """Serve what comes on each line of the input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print as they like
    name, model, threads = sys.argv[1:]
    serve = {"vllm": vllm, "openvino": openvino, "llama": llama}[name](Path(model), int(threads))
    for line in sys.stdin:
        start = time.perf_counter()
        tokens = serve([(prompt, count) for prompt, count in json.loads(line)])
        answer = {"seconds": time.perf_counter() - start, "tokens": tokens}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
