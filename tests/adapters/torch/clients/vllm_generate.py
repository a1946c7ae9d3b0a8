"""Generate tokens by vLLM with a small model of fixed random weights, and print them.

python vllm_generate.py FOLDER OPTION...    # OPTION: NAME=VALUE of vllm.LLM, the value in JSON
"""

import json
import os
import sys
from pathlib import Path

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


def communicators(worker):
    from vllm.distributed import parallel_state

    groups = [parallel_state.get_tp_group(), parallel_state.get_pp_group()]
    return [type(group.device_communicator).__module__ for group in groups if group.world_size > 1]


def main():
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    options = {name: json.loads(value) for name, _, value in (each.partition("=") for each in sys.argv[2:])}
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a process less
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for collective_rpc of a function
        "VLLM_CACHE_ROOT": str(folder / "cache"),
    }
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        gpu_memory_utilization=0.05,
        distributed_executor_backend="mp",
        **options,
    )
    prompts = [{"prompt_token_ids": list(range(3, 3 + 5 * i))} for i in range(1, 4)]
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=2)
    found = [answer.outputs[0] for answer in engine.generate(prompts, greedy, use_tqdm=False)]
    report = {
        "communicators": engine.collective_rpc(communicators),
        "tokens": [list(each.token_ids) for each in found],
        "logprobs": [
            [step[token].logprob for token, step in zip(each.token_ids, each.logprobs, strict=True)]
            for each in found
        ],
    }
    print("\n" + json.dumps(report), flush=True)
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
