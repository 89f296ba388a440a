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

{{- define "reprise-operator.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "reprise-operator.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
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
  verbs: [create, patch]
{{- end }}
