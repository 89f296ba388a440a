"""The check of a vllm-ascend image: a program for its Python, handed over as an argument. Nothing to import here.

That image has no command that judges arguments without a device. What can be done without one: the model's config.json
is read, and the arguments go through vLLM's own parser where its modules can be imported without the NPU's driver.
Where they cannot, the flags are not judged, and the program says so and ends well: the image could be pulled and run.
"""

from __future__ import annotations

SCRIPT = """\
import json, os, sys
words = sys.argv[1:]
only = words[0] == "--arguments-only"
words = words[1:] if only else words
model = words[0]
def wrong(message):
    print("check: " + message, file=sys.stderr)
    sys.exit(2)
if not only and not model.endswith(".gguf"):
    path = os.path.join(model, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except FileNotFoundError:
        wrong("ModelNotFound: " + model + " has no config.json")
    except (OSError, ValueError) as error:
        wrong("DamagedModel: " + path + " cannot be read: " + str(error))
    if not isinstance(config, dict) or not (config.get("architectures") or config.get("model_type")):
        wrong("DamagedModel: " + path + " names no architecture")
elif not only and not os.path.isfile(model):
    wrong("ModelNotFound: " + model + " is not there")
try:
    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
except Exception as error:
    print("check: the flags were not judged: vLLM cannot be imported without a device: %r" % (error,))
    sys.exit(0)
parser.parse_args(words)
print("check: the arguments are valid")
"""
"""Arguments: [--arguments-only] MODEL FLAGS… as of `vllm serve`. Exit code 2 and the reason on stderr."""
