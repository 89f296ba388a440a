"""An emulated Kubernetes API server, for machines where no kube-apiserver is found.

`python -m tests.support.emulated` prints its URL and serves until its stdin closes. What keeps it honest is
tests/contract/apiserver: recorded answers of a real server, replayed against this one too. Its data is in
builtins.yaml (the built-in kinds, with what they refuse as rules in CEL) and messages.yaml (the words of refusals).

Limits, all of them deliberate:
- plain HTTP and JSON, one user who may do everything: no TLS, authentication, RBAC, admission plugins, quotas,
  webhooks or protobuf, so `kubectl create secret|namespace|configmap` and `auth can-i` do not work; `apply` does;
- memory only, and a watch can start at most 20,000 changes back; a status that is a default is stored with the object;
- of built-in kinds those of builtins.yaml, with the defaults and refusals a workload meets and a few columns of their
  own in Tables; wrong types, quantities and base64 are refused with 422 instead of 400;
- strategic merge patch merges keyed lists and knows `$patch: delete`; no `$retainKeys`, `$setElementOrder`, sets;
- a definition has one version, no conversion, no owner of its status; a namespace has no label of its name; CEL is a
  library's (no `.?`, `format`, quantities, URLs, cost); a schema's `format` and exclusive bounds are not known;
- discovery is not aggregated, nor of single groups; no lists of metadata; a bad continue token is a plain 500;
- no pods/log, exec, attach, port-forward, proxy, eviction: ask the node;
- an item of a list that is applied keeps the place it has, unless the applied list has all items.
"""
