"""An emulated Kubernetes API server, for machines where no kube-apiserver is found.

`python -m tests.support.emulated` prints its URL and serves until its stdin closes. What keeps it honest is
tests/contract/apiserver: recorded answers of a real server, replayed against this one too.

It does: storage with resource versions, uids and generations; lists with selectors and pages; watches with bookmarks
and 410; POST, PUT, DELETE and every kind of PATCH, server-side apply with field managers and conflicts included;
structural schemas (pruning, defaults, validation, CEL) of CustomResourceDefinitions; status, scale and binding;
dry runs; field validation; Tables; discovery and OpenAPI as far as kubectl needs them.

Limits, all of them deliberate:
- plain HTTP, one user who may do everything: no TLS, authentication, RBAC, admission plugins, quotas or webhooks;
- memory only: nothing outlives the process; a watch can start at most 4,000 changes of its kind back;
- the built-in kinds are those of `builtins.yaml`, with the defaults a workload meets; their values are checked for type,
  required fields and the rules of `rules.py`, not for all that Kubernetes refuses;
- pods/log, exec, attach, port-forward and proxy are not served: ask the node;
- one version for each CustomResourceDefinition, no conversion; CEL by `common-expression-language`, whose strings
  library is cel-go's but which has no optional types (`.?`), `format`, quantities or URLs; no cost budget;
- `format` in a schema is not checked, metadata is checked for names and labels only;
- JSON only: a body in protobuf is refused (415), so `kubectl create secret`, `create namespace`, `create configmap` and
  `auth can-i` do not work; `kubectl apply` and `create -f` do.
"""
