{{- define "muster.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "muster.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{- define "muster.labels" -}}
{{ include "muster.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | quote }}
{{- end }}

{{- /* An image: by digest where one is given. */ -}}
{{- define "muster.image" -}}
{{- if .image.digest }}{{ .image.repository }}@{{ .image.digest }}{{ else }}{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "muster.secret" -}}
{{ .Values.existingSecret | default (printf "%s-secrets" (include "muster.name" .)) }}
{{- end }}

{{- define "muster.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "muster.name" .) }}{{ else }}{{ .Values.serviceAccount.name | default "default" }}{{ end }}
{{- end }}

{{- define "muster.publicHost" -}}
{{- regexReplaceAll "^https?://([^/:]+).*$" .Values.publicUrl "${1}" }}
{{- end }}

{{- define "muster.gatewayHost" -}}
{{- regexReplaceAll "^https?://([^/:]+).*$" .Values.gatewayPublicUrl "${1}" }}
{{- end }}

{{- define "muster.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .user }}
runAsGroup: {{ .user }}
fsGroup: {{ .user }}
seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "muster.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: ["ALL"] }
{{- end }}

{{- /* What every server reads. Secrets are files, so that no environment shows them. */ -}}
{{- define "muster.environment" -}}
- { name: DATABASE_URL_FILE, value: /run/secrets/muster/database_url }
- { name: REDIS_URL_FILE, value: /run/secrets/muster/redis_url }
- { name: MUSTER_SECRET_KEY_FILE, value: /run/secrets/muster/secret_key }
- { name: MUSTER_LOG_KEY_FILE, value: /run/secrets/muster/log_key }
- { name: MUSTER_CLUSTER_SECRET_FILE, value: /run/secrets/muster/cluster_secret }
- name: MUSTER_PUBLIC_URL
  value: {{ .Values.publicUrl | quote }}
- name: MUSTER_GATEWAY_PUBLIC_URL
  value: {{ .Values.gatewayPublicUrl | quote }}
- name: MUSTER_PLAYGROUND_GATEWAY_URL
  value: {{ printf "http://%s-gateway:8080" (include "muster.name" .) | quote }}
- name: MUSTER_ALLOWED_HOSTS
  value: {{ concat (list (include "muster.publicHost" .) "localhost") .Values.allowedHosts | uniq | join "," | quote }}
- name: MUSTER_BEHIND_TLS
  value: {{ hasPrefix "https://" .Values.publicUrl | toString | quote }}
- name: MUSTER_TRUSTED_PROXIES
  value: {{ join "," .Values.trustedProxies | quote }}
{{- range $name, $value := .Values.settings }}
- name: {{ $name }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end }}

{{- define "muster.mounts" -}}
- { name: secrets, mountPath: /run/secrets/muster, readOnly: true }
- { name: tmp, mountPath: /tmp }
{{- end }}

{{- define "muster.volumes" -}}
- name: secrets
  secret:
    secretName: {{ include "muster.secret" . }}
    defaultMode: 0440
- name: tmp
  emptyDir: {}
{{- end }}

{{- /* Nothing starts before the tables are there. The job migrates; each pod waits for it. */ -}}
{{- define "muster.waitForTables" -}}
- name: wait-for-tables
  image: {{ include "muster.image" (dict "root" . "image" .Values.image) | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: ["sh", "-c", "until python manage.py migrate --check >/tmp/migrate.log 2>&1; do tail -n 1 /tmp/migrate.log; sleep 2; done"]
  env:
    {{- include "muster.environment" . | nindent 4 }}
  securityContext:
    {{- include "muster.containerSecurity" . | nindent 4 }}
  resources:
    requests: { cpu: 50m, memory: 128Mi }
    limits: { memory: 512Mi }
  volumeMounts:
    {{- include "muster.mounts" . | nindent 4 }}
{{- end }}

{{- define "muster.podPlace" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
