"""A worker: says what reached it."""

import json
import os
import sys

from megatron.neox_arguments import NeoXArgs

if __name__ == "__main__":
    neox_args = NeoXArgs.from_dict(json.loads(sys.argv[1]))
    told = {"worker": "generate", "arguments": neox_args.to_dict(), "path": os.environ["PATH"]}
    print(json.dumps(told), flush=True)
