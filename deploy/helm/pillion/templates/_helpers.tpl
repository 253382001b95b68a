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

{{/* Labels that select this release's pods. */}}
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

{{/* OpenShift assigns each namespace a range of ids and rejects pods with others. */}}
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

{{/* A map as a list of environment variables. */}}
{{- define "pillion.envList" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end }}

{{/* An environment variable, not an argument, since the URL may include a password. */}}
{{- define "pillion.redisEnv" -}}
- name: PILLION_REDIS_URL
{{- if .Values.redis.existingSecret }}
  valueFrom:
    secretKeyRef: {name: {{ .Values.redis.existingSecret }}, key: url}
{{- else }}
  value: redis://{{ include "pillion.name" . }}-redis:6379/0
{{- end }}
{{- end }}

{{/* Environment common to all components, as a YAML map for merging. */}}
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
{{- /* Clusters may be IPv4, IPv6 or dual-stack. */}}
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

{{/* A probe of the metrics port, which is plain HTTP even with TLS on other ports. */}}
{{- define "pillion.asked" -}}
httpGet: {path: {{ .path }}, port: {{ .port }}}
timeoutSeconds: 5
{{- end }}

{{/* Liveness fails after a minute without an answer, which also ends fenced workers that hang. It never cuts a
     drain short: Kubernetes does not probe terminating pods. */}}
{{- define "pillion.probes" -}}
startupProbe:
  {{- include "pillion.asked" (dict "path" "/alive" "port" .port) | nindent 2 }}
  periodSeconds: 2
  # 30 minutes: storage may be slow, and gateways may download the model for its tokenizer.
  failureThreshold: 900
# A gateway is ready once the model has a live decode worker; draining components are not ready.
readinessProbe:
  {{- include "pillion.asked" (dict "path" "/health" "port" .port) | nindent 2 }}
  periodSeconds: 5
  failureThreshold: 2
livenessProbe:
  {{- include "pillion.asked" (dict "path" "/alive" "port" .port) | nindent 2 }}
  periodSeconds: 10
  failureThreshold: 6
{{- end }}
