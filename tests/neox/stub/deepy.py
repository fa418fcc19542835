"""A stand-in for GPT-NeoX: as little as the patches can be tried on. This is its launcher."""

import json
import os
import subprocess
import sys

import deepspeed.launcher.runner


def main(input_args=None):
    from megatron.neox_arguments import NeoXArgs

    neox_args = NeoXArgs.consume_deepy_args(input_args)
    print(json.dumps({"launcher": neox_args.pos_emb}), flush=True)
    exported = {name: os.environ.get(name) for name in deepspeed.launcher.runner.EXPORT_ENVS}
    print(json.dumps({"exported": exported}), flush=True)
    command = [sys.executable, *neox_args.get_deepspeed_main_args()]
    sys.exit(subprocess.run(command).returncode)
