{{- define "looplane.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "looplane.selector" -}}
app.kubernetes.io/name: looplane
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end }}

{{- define "looplane.labels" -}}
{{ include "looplane.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "looplane.pickerLabels" -}}
app.kubernetes.io/name: looplane
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: endpoint-picker
{{- end }}

{{- define "looplane.image" -}}
{{- $tag := .Values.image.tag | default (printf "%s%s" .Chart.AppVersion (ternary "-cuda" "" (gt (int .Values.gpus.count) 0))) -}}
{{ .Values.image.repository }}:{{ $tag }}
{{- end }}

{{- define "looplane.scheme" -}}
{{ ternary "HTTPS" "HTTP" (ne .Values.tls.secret "") }}
{{- end }}

{{/* What the schema cannot say, in a sentence. */}}
{{- define "looplane.check" -}}
{{- $needed := add .Values.preStopSeconds (mul 2 .Values.drainSeconds) }}
{{- if le (int .Values.terminationGracePeriodSeconds) (int $needed) }}
{{- fail (printf "terminationGracePeriodSeconds is %d, but must be more than preStopSeconds + 2 x drainSeconds = %d, so that requests and then workers can end." (int .Values.terminationGracePeriodSeconds) $needed) }}
{{- end }}
{{- if and .Values.model.path (not .Values.model.volume) }}
{{- fail (printf "model.path is %s, but model.volume says not where it comes from." .Values.model.path) }}
{{- end }}
{{- $gpus := int .Values.gpus.count }}
{{- if and $gpus (gt (int .Values.tensorParallel) $gpus) }}
{{- fail (printf "tensorParallel is %d, but there are %d GPUs: each worker has one." (int .Values.tensorParallel) $gpus) }}
{{- end }}
{{- if and .Values.autoscaling.enabled (lt (int .Values.autoscaling.maxReplicas) (int .Values.replicas)) }}
{{- fail (printf "autoscaling.maxReplicas is %d, fewer than the %d replicas." (int .Values.autoscaling.maxReplicas) (int .Values.replicas)) }}
{{- end }}
{{- end }}
