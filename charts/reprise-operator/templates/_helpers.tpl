{{- define "reprise-operator.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "reprise-operator.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains (include "reprise-operator.name" .) .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "reprise-operator.name" .) | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "reprise-operator.selectorLabels" -}}
app.kubernetes.io/name: {{ include "reprise-operator.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "reprise-operator.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "reprise-operator.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: reprise
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "reprise-operator.image" -}}
{{- if .Values.image.digest }}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end }}
{{- end }}

{{- define "reprise-operator.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "reprise-operator.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "reprise-operator.referenceKeySecret" -}}
{{- if (.Values.referenceKey).existingSecret }}
{{- .Values.referenceKey.existingSecret }}
{{- else if (.Values.referenceKey).create }}
{{- include "reprise-operator.fullname" . }}-reference-key
{{- end }}
{{- end }}

{{- /* What the operator needs in the namespaces it serves; tests/contract holds it equal to its table of permissions. */ -}}
{{- define "reprise-operator.rules" -}}
- apiGroups: [serving.reprise.io]
  resources: [inferenceservices]
  verbs: [get, list, watch]
- apiGroups: [serving.reprise.io]
  resources: [inferenceservices/status]
  verbs: [patch]
# Owner references with blockOwnerDeletion, where OwnerReferencesPermissionEnforcement is on.
- apiGroups: [serving.reprise.io]
  resources: [inferenceservices/finalizers]
  verbs: [update]
- apiGroups: [apps]
  resources: [deployments, statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [replicasets]
  verbs: [list]
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [get, list, watch, create, patch, delete]
# Deleted are pods of a StatefulSet that are of an older template: the operator says which one goes first.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, delete]
# Why a vLLM engine ended, or a changed one, is in its log, not in its last words.
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
# A change is checked by a Job before the last serving pod is taken for it.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, create, delete]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get]
{{- if .Values.rbac.checkSecrets }}
- apiGroups: [""]
  resources: [secrets]
  verbs: [get]
{{- end }}
- apiGroups: [""]
  resources: [events]
  verbs: [list, create, patch]
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [get, list, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, create, patch, delete]
{{- if .Values.rbac.gateway }}
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [get, list, create, patch, delete]
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, list, create, patch, delete]
{{- end }}
{{- if .Values.rbac.podMonitors }}
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, list, create, patch, delete]
{{- end }}
{{- if .Values.rbac.keda }}
- apiGroups: [keda.sh]
  resources: [scaledobjects]
  verbs: [get, list, create, patch, delete]
{{- end }}
{{- end }}
