"""`reprise-operator run` and `python -m reprise_operator run`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from kubernetes.aio.config.config_exception import ConfigException

from reprise_operator.leader import LeadershipLost
from reprise_operator.logs import configure_logging
from reprise_operator.options import parse_options
from reprise_operator.process import serve

logger = logging.getLogger("reprise_operator")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 after a signal, 1 when the operator had to give up (the kubelet starts it again), 2 on bad flags."""
    options = parse_options(sys.argv[1:] if arguments is None else arguments, os.environ)
    configure_logging(log_format=options.log_format, level=options.log_level)
    try:
        asyncio.run(serve(options))
    except ConfigException as error:
        logger.error("no cluster to connect to: %s; set KUBECONFIG, or run in a pod with a service account", error)
        return 1
    except Exception as error:
        lost = isinstance(error, ExceptionGroup) and error.subgroup(LeadershipLost) is not None
        if lost:
            logger.error("the lease was lost; giving up so that two operators never work at once")
        else:
            logger.exception("the operator has to give up")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
