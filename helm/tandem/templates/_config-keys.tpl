{{- define "tandem.configKeys" -}}
["model", "pools", "prices", "kv", "router", "autoscale", "cluster", "security", "metrics", "frontend", "tracing"]
{{- end -}}
