{{/* grpc.health of the router. kubelet speaks no TLS to gRPC, so with TLS the router's own command asks. */}}
{{- define "tandem.router.probe" -}}
{{- $port := include "tandem.port" .root.Values.router.listen | int -}}
{{- if .root.Values.secrets.tls.enabled -}}
exec:
  command: [tandem, probe, --config, /etc/tandem/config/config.yaml{{ with .service }}, --ready{{ end }}]
{{- else -}}
grpc:
  port: {{ $port }}
  {{- with .service }}
  service: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}
