"""The wire protocol: `.proto` sources and the code that tools/protoc.sh makes of them."""
