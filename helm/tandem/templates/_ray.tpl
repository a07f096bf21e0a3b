{{/* The spec of a RayCluster; also the rayClusterConfig of a RayService. */}}
{{- define "tandem.rayClusterSpec" -}}
{{- $root := . -}}
rayVersion: {{ .Values.rayVersion | quote }}
enableInTreeAutoscaling: {{ .Values.head.enableInTreeAutoscaling }}
{{- if .Values.head.enableInTreeAutoscaling }}
autoscalerOptions:
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  {{- toYaml .Values.head.autoscalerOptions | nindent 2 }}
{{- end }}
{{- if .Values.secrets.rayAuth.enabled }}
authOptions:
  mode: token
  secretName: {{ include "tandem.raySecret" . }}
{{- end }}
{{- if .Values.gcsFaultTolerance.enabled }}
gcsFaultToleranceOptions:
  backend: redis
  redisAddress: {{ .Values.gcsFaultTolerance.redisAddress | quote }}
  externalStorageNamespace: {{ default (include "tandem.fullname" .) .Values.gcsFaultTolerance.externalStorageNamespace | quote }}
  {{- with .Values.gcsFaultTolerance.redisPassword }}
  {{- if .existingSecret }}
  redisPassword:
    valueFrom:
      secretKeyRef: {name: {{ .existingSecret }}, key: {{ .key }}}
  {{- end }}
  {{- end }}
{{- end }}
headGroupSpec:
  serviceType: ClusterIP
  rayStartParams: {{- include "tandem.head.params" . | nindent 4 }}
  template: {{- include "tandem.head.pod" . | nindent 4 }}
workerGroupSpecs:
{{- range .Values.pools }}
{{- $own := index $root.Values.additionalWorkerGroups .name | default dict }}
{{- $pod := mergeOverwrite (deepCopy $root.Values.worker) $own }}
  - {{- include "tandem.workerGroup" (dict "root" $root "pool" . "pod" $pod) | nindent 4 }}
{{- end }}
{{- end -}}

{{- define "tandem.head.params" -}}
{{- $params := dict "num-cpus" "0" "num-gpus" "0" "disable-usage-stats" "true" -}}
{{- $_ := set $params "dashboard-host" (ternary "0.0.0.0" "127.0.0.1" (eq .Values.kind "RayService")) -}}
{{- toYaml (mergeOverwrite $params .Values.head.rayStartParams) -}}
{{- end -}}

{{- define "tandem.head.pod" -}}
{{- $pod := .Values.head -}}
metadata:
  labels: {{- include "tandem.selectorLabels" . | nindent 4 }}
    tandem.dev/component: head
    {{- with $pod.labels }}{{ toYaml . | nindent 4 }}{{ end }}
  annotations: {{- include "tandem.checksum" . | nindent 4 }}
    {{- with $pod.annotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  serviceAccountName: {{ include "tandem.serviceAccount" . }}
  automountServiceAccountToken: {{ .Values.head.enableInTreeAutoscaling }}
  {{- include "tandem.pod.place" (dict "root" . "pod" $pod "component" "head") | nindent 2 }}
  {{- if or $pod.initContainers (eq .Values.weights.source "download") }}
  initContainers:
    {{- if eq .Values.weights.source "download" }}
    {{- include "tandem.weights.download" (dict "root" . "only" "*.json") | nindent 4 }}
    {{- end }}
    {{- with $pod.initContainers }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- end }}
  containers:
    - name: ray-head
      image: {{ include "tandem.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      # KubeRay puts this before its own `ray start`. The controller's keeper waits for Ray and must share its process namespace.
      command: ["(while true; do tandem controller --config /etc/tandem/config/config.yaml; sleep 5; done &)"]
      ports:
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        - {name: metrics, containerPort: 8080}
        - {name: directory, containerPort: {{ include "tandem.port" .Values.cluster.controller_listen }}}
        - {name: controller, containerPort: {{ .Values.metrics.controller_port }}}
        {{- if eq .Values.kind "RayService" }}
        - {name: serve, containerPort: 8000}
        {{- end }}
      env: {{- include "tandem.ray.env" . | nindent 8 }}
        {{- with $pod.containerEnv }}{{ toYaml . | nindent 8 }}{{ end }}
      {{- with $pod.envFrom }}
      envFrom: {{- toYaml . | nindent 8 }}
      {{- end }}
      resources: {{- toYaml $pod.resources | nindent 8 }}
      securityContext: {{- toYaml $pod.securityContext | nindent 8 }}
      volumeMounts: {{- include "tandem.secrets.mounts" . | nindent 8 }}
        {{- include "tandem.weights.mount" (dict "root" . "writes" false) | nindent 8 }}
        - {name: shm, mountPath: /dev/shm}
        - {name: tmp, mountPath: /tmp}
        {{- with $pod.volumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
    {{- with $pod.sidecarContainers }}{{ toYaml . | nindent 4 }}{{ end }}
  volumes: {{- include "tandem.secrets.volumes" . | nindent 4 }}
    {{- include "tandem.weights.volume" . | nindent 4 }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $pod.shmSize }}}
    - name: tmp
      emptyDir: {}
    {{- with $pod.volumes }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end -}}

{{- define "tandem.workerGroup" -}}
{{- $tp := dig "layout" "tp" 1 .pool | int -}}
{{- $gpus := ternary $tp 0 (ne .root.Values.cluster.device "cpu") -}}
{{- $min := .pod.minReplicas | default (dig "replicas" "min" 1 .pool) | int -}}
{{- if hasKey .pod "minReplicas" }}{{ if not (kindIs "invalid" .pod.minReplicas) }}{{ $min = .pod.minReplicas | int }}{{ end }}{{ end -}}
{{- $max := .pod.maxReplicas | default (dig "replicas" "max" 1 .pool) | int -}}
{{- if lt $max $min }}{{ fail (printf "additionalWorkerGroups.%s.maxReplicas: %d is below minReplicas (%d)" .pool.name $max $min) }}{{ end -}}
{{- $params := dict "num-gpus" ($gpus | toString) "num-cpus" ($tp | toString) "disable-usage-stats" "true" -}}
{{- $component := printf "pool-%s" .pool.name -}}
{{- $resources := deepCopy .pod.resources -}}
{{- if gt ($gpus | int) 0 -}}
{{- if not .pod.gpuResource }}{{ fail (printf "worker.gpuResource: pool %s runs on GPUs; name the resource that nodes offer" .pool.name) }}{{ end -}}
{{- range list "requests" "limits" }}{{ $_ := set (index $resources .) $.pod.gpuResource ($gpus | toString) }}{{ end -}}
{{- end -}}
groupName: {{ .pool.name }}
replicas: {{ .pod.replicas | default $min | int }}
minReplicas: {{ $min }}
maxReplicas: {{ $max }}
{{- if and .root.Values.head.enableInTreeAutoscaling .pod.idleTimeoutSeconds }}
idleTimeoutSeconds: {{ .pod.idleTimeoutSeconds }}
{{- end }}
labels: {{- include "tandem.nodeLabels" .pool | nindent 2 }}
rayStartParams: {{- toYaml (mergeOverwrite $params (.pod.rayStartParams | default dict)) | nindent 2 }}
template:
  metadata:
    labels: {{- include "tandem.selectorLabels" .root | nindent 6 }}
      tandem.dev/component: {{ $component }}
      tandem.dev/role: {{ .pool.role }}
      {{- with .pod.labels }}{{ toYaml . | nindent 6 }}{{ end }}
    annotations: {{- include "tandem.checksum" .root | nindent 6 }}
      {{- with .pod.annotations }}{{ toYaml . | nindent 6 }}{{ end }}
  spec:
    automountServiceAccountToken: false
    # Its groups drain (preStop), then Ray has a moment to end.
    terminationGracePeriodSeconds: {{ add (include "tandem.leave.seconds" .root) 30 }}
    {{- include "tandem.pod.place" (dict "root" .root "pod" .pod "component" $component) | nindent 4 }}
    initContainers:
      {{- if eq .root.Values.weights.source "download" }}
      {{- include "tandem.weights.download" (dict "root" .root "only" "") | nindent 6 }}
      {{- end }}
      # Checkpoint, FP8 shards, kernels: its message says what the pod waits for (kubectl describe pod).
      - name: prepare
        image: {{ include "tandem.image" .root }}
        imagePullPolicy: {{ .root.Values.image.pullPolicy }}
        command: [tandem, prepare, --config, /etc/tandem/config/config.yaml, --pool, {{ .pool.name | quote }}]
        args: [--timeout-s, {{ .root.Values.weights.prepareTimeoutSeconds | quote }}, --report, /dev/termination-log]
        env: {{- include "tandem.kernelCache.env" . | nindent 10 }}
        resources: {{- toYaml $resources | nindent 10 }}
        securityContext: {{- toYaml .pod.securityContext | nindent 10 }}
        volumeMounts: {{- include "tandem.secrets.mounts" .root | nindent 10 }}
          {{- include "tandem.weights.mount" (dict "root" .root "writes" true) | nindent 10 }}
          - {name: kernel-cache, mountPath: /var/cache/tandem}
          - {name: tmp, mountPath: /tmp}
      {{- with .pod.initContainers }}{{ toYaml . | nindent 6 }}{{ end }}
    containers:
      - name: ray-worker
        image: {{ include "tandem.image" .root }}
        imagePullPolicy: {{ .root.Values.image.pullPolicy }}
        ports:
          - {name: metrics, containerPort: 8080}
          - {name: group, containerPort: {{ .root.Values.metrics.group_port }}}
        # KubeRay's own FQ_RAY_IP is the head of this pod's cluster, also while a RayService has two.
        lifecycle:
          preStop:
            exec:
              command:
                - sh
                - -c
                - exec tandem leave --config /etc/tandem/config/config.yaml --node "$TANDEM_NODE_ADDRESS" --controller "$FQ_RAY_IP:{{ include "tandem.port" .root.Values.cluster.controller_listen }}" --timeout-s {{ include "tandem.leave.seconds" .root }}
        env: {{- include "tandem.ray.env" .root | nindent 10 }}
          {{- include "tandem.kernelCache.env" . | nindent 10 }}
          - name: TANDEM_NODE_ADDRESS
            valueFrom: {fieldRef: {fieldPath: status.podIP}}
          {{- with .pod.containerEnv }}{{ toYaml . | nindent 10 }}{{ end }}
        {{- with .pod.envFrom }}
        envFrom: {{- toYaml . | nindent 10 }}
        {{- end }}
        resources: {{- toYaml $resources | nindent 10 }}
        securityContext: {{- toYaml .pod.securityContext | nindent 10 }}
        volumeMounts: {{- include "tandem.secrets.mounts" .root | nindent 10 }}
          {{- include "tandem.weights.mount" (dict "root" .root "writes" false) | nindent 10 }}
          - {name: kernel-cache, mountPath: /var/cache/tandem}
          - {name: shm, mountPath: /dev/shm}
          - {name: tmp, mountPath: /tmp}
          {{- with .pod.volumeMounts }}{{ toYaml . | nindent 10 }}{{ end }}
      {{- with .pod.sidecarContainers }}{{ toYaml . | nindent 6 }}{{ end }}
    volumes: {{- include "tandem.secrets.volumes" .root | nindent 6 }}
      {{- include "tandem.weights.volume" .root | nindent 6 }}
      - name: kernel-cache
        {{- if .root.Values.kernelCache.hostPath }}
        hostPath: {path: {{ .root.Values.kernelCache.hostPath }}, type: Directory}
        {{- else }}
        emptyDir: {sizeLimit: {{ .root.Values.kernelCache.size }}}
        {{- end }}
      - name: shm
        emptyDir: {medium: Memory, sizeLimit: {{ .pod.shmSize }}}
      - name: tmp
        emptyDir: {}
      {{- with .pod.volumes }}{{ toYaml . | nindent 6 }}{{ end }}
{{- end -}}

{{/* How long a worker pod waits for its groups to drain: the grace that running requests have, and the ranks' own end. */}}
{{- define "tandem.leave.seconds" -}}
{{- add (ceil .Values.cluster.drain_grace_s) 20 -}}
{{- end -}}

{{- define "tandem.kernelCache.env" -}}
- {name: TRITON_CACHE_DIR, value: /var/cache/tandem/triton}
- {name: FLASHINFER_WORKSPACE_BASE, value: /var/cache/tandem/flashinfer}
- {name: DG_JIT_CACHE_DIR, value: /var/cache/tandem/deep-gemm}
- {name: CUDA_CACHE_PATH, value: /var/cache/tandem/cuda}
{{- end -}}
