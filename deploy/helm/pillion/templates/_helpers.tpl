{{- define "pillion.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "pillion.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* What finds the pods of this release. */}}
{{- define "pillion.selector" -}}
app.kubernetes.io/name: pillion
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "pillion.labels" -}}
{{ include "pillion.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* OpenShift gives each namespace ids of its own, and refuses pods that ask for others. */}}
{{- define "pillion.ids" -}}
{{- if not (.root.Capabilities.APIVersions.Has "security.openshift.io/v1") }}
{{- range $name, $id := .ids }}
{{- if not (kindIs "invalid" $id) }}
{{ $name }}: {{ int64 $id }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "pillion.podSecurity" -}}
runAsNonRoot: true
{{- include "pillion.ids" (dict "root" . "ids" .Values.podSecurity) }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "pillion.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* One list of environment variables out of a map; later maps win. */}}
{{- define "pillion.envList" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end }}

{{/* What every part is told. A Secret's URL may hold a password, so it is no argument. */}}
{{- define "pillion.redisEnv" -}}
- name: PILLION_REDIS_URL
{{- if .Values.redis.existingSecret }}
  valueFrom:
    secretKeyRef: {name: {{ .Values.redis.existingSecret }}, key: url}
{{- else }}
  value: redis://{{ include "pillion.name" . }}-redis:6379/0
{{- end }}
{{- end }}

{{/* A map, as YAML, so that others can be merged over it. */}}
{{- define "pillion.env" -}}
PILLION_MODEL: {{ .Values.model.name | quote }}
PILLION_SERVED_MODEL_NAME: {{ .Values.model.servedName | quote }}
PILLION_DTYPE: {{ .Values.model.dtype | quote }}
PILLION_MAX_MODEL_LEN: {{ .Values.model.maxModelLen | int | toString | quote }}
PILLION_BLOCK_SIZE: {{ .Values.model.blockSize | int | toString | quote }}
PILLION_CPU_KERNELS: {{ .Values.model.cpuKernels | quote }}
PILLION_QUANTIZATION: {{ .Values.model.quantization | quote }}
PILLION_QUANTIZATION_GROUP_SIZE: {{ .Values.model.quantizationGroupSize | toString | quote }}
PILLION_ACTIVATION_QUANTIZATION: {{ .Values.model.activationQuantization | quote }}
PILLION_KV_CACHE_DTYPE: {{ .Values.model.kvCacheDtype | quote }}
{{- if .Values.adapters.enabled }}
PILLION_ENABLE_LORA: "true"
PILLION_MAX_LORAS: {{ .Values.adapters.maxLoras | int | toString | quote }}
PILLION_MAX_LORA_RANK: {{ .Values.adapters.maxLoraRank | int | toString | quote }}
{{- end }}
{{- /* Both families: a cluster may have either, or both. */}}
PILLION_METRICS_HOST: "::"
PILLION_INSECURE_INTERNAL: {{ empty .Values.internalTls.existingSecret | toString | quote }}
{{- if .Values.internalTls.existingSecret }}
PILLION_INTERNAL_TLS_CERT: /etc/pillion/internal/tls.crt
PILLION_INTERNAL_TLS_KEY: /etc/pillion/internal/tls.key
PILLION_INTERNAL_TLS_CA: /etc/pillion/internal/ca.crt
{{- end }}
{{- if .Values.tracing.endpoint }}
OTEL_EXPORTER_OTLP_ENDPOINT: {{ .Values.tracing.endpoint | quote }}
OTEL_EXPORTER_OTLP_PROTOCOL: grpc
OTEL_TRACES_SAMPLER: {{ .Values.tracing.sampler | quote }}
OTEL_TRACES_SAMPLER_ARG: {{ .Values.tracing.samplerArg | quote }}
{{- end }}
{{- end }}

{{- define "pillion.volumes" -}}
- name: cache
{{- toYaml .Values.cache.volume | nindent 2 }}
- name: tmp
  emptyDir: {medium: Memory, sizeLimit: 256Mi}
{{- if .Values.model.volume }}
- name: models
{{- toYaml .Values.model.volume | nindent 2 }}
{{- end }}
{{- if .Values.internalTls.existingSecret }}
- name: internal-tls
  secret: {secretName: {{ .Values.internalTls.existingSecret }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{- define "pillion.mounts" -}}
- {name: cache, mountPath: /cache}
- {name: tmp, mountPath: /tmp}
{{- if .Values.model.volume }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if .Values.internalTls.existingSecret }}
- {name: internal-tls, mountPath: /etc/pillion/internal, readOnly: true}
{{- end }}
{{- end }}

{{/* How a part is asked: the kubelet reads a page of its metrics port, which is plain HTTP whatever TLS the other ports
     speak, and nothing is started in the container for it. */}}
{{- define "pillion.asked" -}}
httpGet: {path: {{ .path }}, port: {{ .port }}}
timeoutSeconds: 5
{{- end }}

{{/* Who does not answer for a minute hangs: a fenced worker that does not come back must be killed by somebody. Kubernetes
     asks nothing of a pod that it has told to stop, so a drain is not cut short. */}}
{{- define "pillion.probes" -}}
startupProbe:
  {{- include "pillion.asked" (dict "path" "/alive" "port" .port) | nindent 2 }}
  periodSeconds: 2
  # Weights may have to be read from far away, and a gateway may have to fetch the model for its tokenizer.
  failureThreshold: 900
# A gateway is ready once a decode worker of the model lives; what drains is not ready any more.
readinessProbe:
  {{- include "pillion.asked" (dict "path" "/health" "port" .port) | nindent 2 }}
  periodSeconds: 5
  failureThreshold: 2
livenessProbe:
  {{- include "pillion.asked" (dict "path" "/alive" "port" .port) | nindent 2 }}
  periodSeconds: 10
  failureThreshold: 6
{{- end }}
