{{/* Names, labels and the image. */}}

{{- define "tandem.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- $full | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "tandem.selectorLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/part-of: tandem
{{- end -}}

{{- define "tandem.labels" -}}
{{ include "tandem.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "tandem.image" -}}
{{- $tag := default .Chart.AppVersion .Values.image.tag -}}
{{- if eq $tag "latest" }}{{ fail "image.tag: latest is refused; name a version" }}{{ end -}}
{{- printf "%s:%s" .Values.image.repository $tag -}}
{{- end -}}

{{- define "tandem.serviceAccount" -}}
{{- default (include "tandem.fullname" .) .Values.serviceAccount.name -}}
{{- end -}}

{{/* Where routers find the controller: KubeRay's head service follows the head, also to another cluster of a RayService. */}}
{{- define "tandem.directory" -}}
{{- printf "%s-head-svc:%s" (include "tandem.fullname" .) (include "tandem.port" .Values.cluster.controller_listen) -}}
{{- end -}}

{{- define "tandem.port" -}}
{{- regexFind "[0-9]+$" . -}}
{{- end -}}

{{- define "tandem.transferSecret" -}}
{{- default (printf "%s-transfer" (include "tandem.fullname" .)) .Values.secrets.transferKey.existingSecret -}}
{{- end -}}
{{- define "tandem.raySecret" -}}
{{- default (printf "%s-ray" (include "tandem.fullname" .)) .Values.secrets.rayAuth.existingSecret -}}
{{- end -}}
{{- define "tandem.tokensSecret" -}}
{{- default (printf "%s-tokens" (include "tandem.fullname" .)) .Values.secrets.tokens.existingSecret -}}
{{- end -}}
{{- define "tandem.tlsSecret" -}}
{{- default (printf "%s-tls" (include "tandem.fullname" .)) .Values.secrets.tls.existingSecret -}}
{{- end -}}
{{- define "tandem.claim" -}}
{{- default (printf "%s-models" (include "tandem.fullname" .)) .Values.weights.pvc.claimName -}}
{{- end -}}
