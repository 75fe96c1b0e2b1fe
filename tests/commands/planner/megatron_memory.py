"""A program: Megatron's own estimates for command lines, parsed and validated by Megatron; JSON in, JSON out.

Reads {name: [processes, flags]}; prints {name: numbers} in its last line.
"""

import json
import os
import sys

from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding
from megatron.training import arguments, theoretical_memory_usage

cases = json.loads(sys.argv[1])
found = {}
for name, (processes, flags) in cases.items():
    os.environ.update({"WORLD_SIZE": str(processes), "RANK": "0"})
    sys.argv = ["plan", *flags]
    args = arguments.parse_args()
    arguments.validate_args(args)
    args.padded_vocab_size = vocab_size_with_padding(args.vocab_size, args, logging_enabled=False)
    found[name] = {
        "state": theoretical_memory_usage.compute_weight_and_optimizer_memory(args),
        "activations": theoretical_memory_usage.compute_activation_memory(args, num_microbatches=64),
        "padded_vocab_size": args.padded_vocab_size,
        "replicas": args.data_parallel_size,
    }
print("\n" + json.dumps(found))
