{{/* What router and frontend share. Arguments: dict "root" $ "name" "router"|"frontend" */}}

{{- define "tandem.deployment.head" -}}
{{- $pod := index .root.Values.deployments .name -}}
{{- $full := printf "%s-%s" (include "tandem.fullname" .root) .name -}}
{{- $live := lookup "apps/v1" "Deployment" .root.Release.Namespace $full | default dict -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $full }}
  labels: {{- include "tandem.labels" .root | nindent 4 }}
    tandem.dev/component: {{ .name }}
spec:
  # An upgrade leaves the number alone that the autoscaler has set.
  replicas: {{ if $pod.autoscaling.enabled }}{{ dig "spec" "replicas" $pod.replicas $live | int }}{{ else }}{{ $pod.replicas }}{{ end }}
  strategy:
    type: RollingUpdate
    rollingUpdate: {maxUnavailable: 0, maxSurge: 1}
  selector:
    matchLabels: {{- include "tandem.selectorLabels" .root | nindent 6 }}
      tandem.dev/component: {{ .name }}
{{- end -}}

{{- define "tandem.deployment.metadata" -}}
{{- $pod := index .root.Values.deployments .name -}}
labels: {{- include "tandem.selectorLabels" .root | nindent 2 }}
  tandem.dev/component: {{ .name }}
  {{- with $pod.labels }}{{ toYaml . | nindent 2 }}{{ end }}
annotations: {{- include "tandem.checksum" .root | nindent 2 }}
  {{- with $pod.annotations }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end -}}

{{/* Service, PodDisruptionBudget and HorizontalPodAutoscaler. "ports": list of {name, port, target} */}}
{{- define "tandem.deployment.beside" -}}
{{- $pod := index .root.Values.deployments .name -}}
{{- $full := printf "%s-%s" (include "tandem.fullname" .root) .name -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ $full }}
  labels: {{- include "tandem.labels" .root | nindent 4 }}
    tandem.dev/component: {{ .name }}
  {{- with $pod.service.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  type: {{ $pod.service.type }}
  selector: {{- include "tandem.selectorLabels" .root | nindent 4 }}
    tandem.dev/component: {{ .name }}
  ports: {{- toYaml .ports | nindent 4 }}
{{- if $pod.podDisruptionBudget.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ $full }}
  labels: {{- include "tandem.labels" .root | nindent 4 }}
spec:
  maxUnavailable: {{ $pod.podDisruptionBudget.maxUnavailable }}
  selector:
    matchLabels: {{- include "tandem.selectorLabels" .root | nindent 6 }}
      tandem.dev/component: {{ .name }}
{{- end }}
{{- if $pod.autoscaling.enabled }}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ $full }}
  labels: {{- include "tandem.labels" .root | nindent 4 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ $full }}}
  minReplicas: {{ $pod.autoscaling.minReplicas }}
  maxReplicas: {{ $pod.autoscaling.maxReplicas }}
  metrics:
    - type: Pods
      pods:
        metric: {name: {{ $pod.autoscaling.metric }}}
        target: {type: AverageValue, averageValue: {{ $pod.autoscaling.targetStreams | quote }}}
  behavior:
    scaleDown:
      stabilizationWindowSeconds: 300
      policies: [{type: Pods, value: 1, periodSeconds: 60}]
{{- end }}
{{- end -}}
