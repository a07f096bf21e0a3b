{{/* The configuration as Tandem's own loader reads it: the part of the values that is the config tree. */}}

{{- define "tandem.config" -}}
{{- $tree := dict -}}
{{- range include "tandem.configKeys" . | fromJsonArray -}}
{{- if hasKey $.Values . }}{{ $_ := set $tree . (index $.Values .) }}{{ end -}}
{{- end -}}
{{- $pools := list -}}
{{- range .Values.pools -}}
{{- $pools = append $pools (merge (dict "node_labels" (include "tandem.nodeLabels" . | fromYaml)) .) -}}
{{- end -}}
{{- $_ := set $tree "pools" $pools -}}
{{- $security := deepCopy (get $tree "security" | default dict) -}}
{{- if and .Values.secrets.tls.enabled (not $security.tls) -}}
{{- $folder := "/etc/tandem/tls" -}}
{{- $tls := dict "ca_file" (printf "%s/ca.crt" $folder) "cert_file" (printf "%s/tls.crt" $folder) "key_file" (printf "%s/tls.key" $folder) -}}
{{- $_ := set $security "tls" (merge $tls (dict "mutual" .Values.secrets.tls.mutual "peer_name" (include "tandem.fullname" .))) -}}
{{- end -}}
{{- if and .Values.secrets.tokens.enabled (not $security.tokens_file) -}}
{{- $_ := set $security "tokens_file" "/etc/tandem/tokens/tokens.yaml" -}}
{{- end -}}
{{- $frontend := deepCopy .Values.frontend -}}
{{- if .Values.secrets.tls.enabled }}{{ $_ := set $frontend "https" (dig "https" true $frontend) }}{{ end -}}
{{- if .Values.secrets.tokens.enabled }}{{ $_ := set $frontend "token_file" (dig "token_file" "/etc/tandem/tokens/client" $frontend) }}{{ end -}}
{{- if .Values.deployments.frontend.apiKeysSecret }}{{ $_ := set $frontend "keys_file" (dig "keys_file" "/etc/tandem/api-keys/keys.yaml" $frontend) }}{{ end -}}
{{- $_ := set $tree "frontend" $frontend -}}
{{- if $security }}{{ $_ := set $tree "security" $security }}{{ end -}}
{{- toYaml $tree -}}
{{- end -}}

{{/* Ray labels that a pool's pods carry and its groups ask for. */}}
{{- define "tandem.nodeLabels" -}}
{{- toYaml (merge (dict "tandem.dev/pool" .name) (.node_labels | default dict)) -}}
{{- end -}}

{{/* What the schema can't say. Each message names the key. */}}
{{- define "tandem.check" -}}
{{- $roles := list -}}
{{- $names := list -}}
{{- $gpus := 0 -}}
{{- range .Values.pools -}}
{{- $tp := dig "layout" "tp" 1 . | int -}}
{{- if not (has $tp (list 1 2 4 8)) }}{{ fail (printf "pools.%s.layout.tp: %d; 1, 2, 4 and 8 exist" .name $tp) }}{{ end -}}
{{- if not (has (dig "layout" "ep" 1 . | int) (list 1 $tp)) }}{{ fail (printf "pools.%s.layout.ep: must be 1 or equal tp (%d)" .name $tp) }}{{ end -}}
{{- $min := dig "replicas" "min" 1 . | int -}}
{{- if lt (dig "replicas" "max" 1 . | int) (max $min 1 | int) }}{{ fail (printf "pools.%s.replicas.max: must be at least 1 and not below min" .name) }}{{ end -}}
{{- if has .name $names }}{{ fail (printf "pools.%s: the name is there twice" .name) }}{{ end -}}
{{- $roles = append $roles .role -}}
{{- $names = append $names .name -}}
{{- $gpus = add $gpus (mul $min $tp) -}}
{{- end -}}
{{- range list "prefill" "decode" -}}
{{- if not (has . $roles) }}{{ fail (printf "pools: no %s pool; at least one of each role is needed" .) }}{{ end -}}
{{- end -}}
{{- if gt ($gpus | int) (.Values.autoscale.gpu_budget | int) }}{{ fail (printf "autoscale.gpu_budget: %d, but pools want at least %d GPUs" (.Values.autoscale.gpu_budget | int) ($gpus | int)) }}{{ end -}}
{{- range $name, $group := .Values.additionalWorkerGroups -}}
{{- if not (has $name $names) }}{{ fail (printf "additionalWorkerGroups.%s: no such pool; there are %s" $name (join ", " $names)) }}{{ end -}}
{{- end -}}
{{- range list "controller_port" "router_port" "group_port" -}}
{{- if not (index $.Values.metrics .) }}{{ fail (printf "metrics.%s: scrapers need a fixed port" .) }}{{ end -}}
{{- end -}}
{{- if not .Values.frontend.metrics_port }}{{ fail "frontend.metrics_port: scrapers need a fixed port" }}{{ end -}}
{{- range list (list "router.listen" .Values.router.listen) (list "frontend.listen" (.Values.frontend.listen | default "")) (list "cluster.controller_listen" .Values.cluster.controller_listen) -}}
{{- if not (regexMatch "^(0\\.0\\.0\\.0|\\[::\\]):[1-9][0-9]*$" (last .)) }}{{ fail (printf "%s: %s; other pods call it: give 0.0.0.0 and a fixed port" (first .) (last .)) }}{{ end -}}
{{- end -}}
{{- if not (hasPrefix (printf "%s/" (trimSuffix "/" .Values.weights.mountPath)) .Values.model.path) }}{{ fail (printf "model.path: %s does not lie in weights.mountPath (%s)" .Values.model.path .Values.weights.mountPath) }}{{ end -}}
{{- if and .Values.gcsFaultTolerance.enabled (not .Values.gcsFaultTolerance.redisAddress) }}{{ fail "gcsFaultTolerance.redisAddress: must be set" }}{{ end -}}
{{- if and .Values.secrets.tls.enabled .Values.secrets.tls.certManager.enabled (not .Values.secrets.tls.certManager.issuerRef.name) }}{{ fail "secrets.tls.certManager.issuerRef.name: must be set" }}{{ end -}}
{{- if and .Values.weights.pvc.create.enabled .Values.weights.pvc.claimName }}{{ fail "weights.pvc.claimName: leave it empty where weights.pvc.create.enabled makes the claim" }}{{ end -}}
{{- end -}}
