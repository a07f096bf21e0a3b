{{/* What the pods have in common. Arguments: dict "root" $ "pod" (the values of this kind of pod), where one is not enough. */}}

{{- define "tandem.pod.place" -}}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .pod.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
topologySpreadConstraints:
{{- range .pod.topologySpreadConstraints | default (list (dict "maxSkew" 1 "topologyKey" "kubernetes.io/hostname" "whenUnsatisfiable" "ScheduleAnyway")) }}
  - {{- toYaml (mergeOverwrite (dict "labelSelector" (dict "matchLabels" (include "tandem.selectorLabels" $.root | fromYaml | merge (dict "tandem.dev/component" $.component)))) .) | nindent 4 }}
{{- end }}
securityContext: {{- toYaml .pod.podSecurityContext | nindent 2 }}
{{- end -}}

{{- define "tandem.weights.volume" -}}
- name: models
{{- if eq .Values.weights.source "pvc" }}
  persistentVolumeClaim:
    claimName: {{ include "tandem.claim" . }}
{{- else if eq .Values.weights.source "hostPath" }}
  hostPath:
    path: {{ .Values.weights.hostPath.path }}
    type: Directory
{{- else }}
  emptyDir:
    sizeLimit: {{ .Values.weights.download.size }}
{{- end }}
{{- end -}}

{{/* Arguments: dict "root" $ "writes" bool */}}
{{- define "tandem.weights.mount" -}}
- name: models
  mountPath: {{ .root.Values.weights.mountPath }}
{{- if or .root.Values.weights.readOnly (not .writes) }}
  readOnly: true
{{- end }}
{{- end -}}

{{/* Fetches the checkpoint, or of it only the small files that head and routers read. Arguments: dict "root" $ "only" pattern or "" */}}
{{- define "tandem.weights.download" -}}
{{- $download := .root.Values.weights.download -}}
- name: download
  image: {{ include "tandem.image" .root }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [hf, download, {{ $download.repository | quote }}, --local-dir, {{ .root.Values.model.path | quote }}]
  args:
    - --exclude=original/*
    - --exclude=metal/*
    {{- with $download.revision }}
    - --revision={{ . }}
    {{- end }}
    {{- with .only }}
    - --include={{ . }}
    {{- end }}
  env:
    - {name: HF_HOME, value: /tmp/hf}
    {{- with $download.tokenSecret }}
    - name: HF_TOKEN
      valueFrom: {secretKeyRef: {name: {{ . }}, key: HF_TOKEN}}
    {{- end }}
  resources: {{- toYaml $download.resources | nindent 4 }}
  securityContext: {{- toYaml .root.Values.worker.securityContext | nindent 4 }}
  volumeMounts:
    - {name: models, mountPath: {{ .root.Values.weights.mountPath }}}
    - {name: tmp, mountPath: /tmp}
{{- end -}}

{{- define "tandem.secrets.volumes" -}}
- name: config
  configMap:
    name: {{ include "tandem.fullname" . }}-config
- name: transfer-key
  secret:
    secretName: {{ include "tandem.transferSecret" . }}
    defaultMode: 0440
{{- if .Values.secrets.tokens.enabled }}
- name: tokens
  secret:
    secretName: {{ include "tandem.tokensSecret" . }}
    defaultMode: 0440
{{- end }}
{{- if .Values.secrets.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "tandem.tlsSecret" . }}
    defaultMode: 0440
{{- end }}
{{- end -}}

{{- define "tandem.secrets.mounts" -}}
- {name: config, mountPath: /etc/tandem/config, readOnly: true}
- {name: transfer-key, mountPath: /etc/tandem/transfer-key, readOnly: true}
{{- if .Values.secrets.tokens.enabled }}
- {name: tokens, mountPath: /etc/tandem/tokens, readOnly: true}
{{- end }}
{{- if .Values.secrets.tls.enabled }}
- {name: tls, mountPath: /etc/tandem/tls, readOnly: true}
{{- end }}
{{- end -}}

{{- define "tandem.ray.env" -}}
- {name: RAY_DISABLE_DOCKER_CPU_WARNING, value: "1"}
- {name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO, value: "0"}
- {name: RAY_gcs_rpc_server_reconnect_timeout_s, value: "600"}
{{- end -}}

{{/* Changes with everything that a pod reads at its start. */}}
{{- define "tandem.checksum" -}}
checksum/config: {{ include "tandem.config" . | sha256sum }}
{{- end -}}
