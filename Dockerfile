# The sidecar as a container: one static binary, no shell, an unprivileged user.
FROM golang:1.26.8 AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
RUN CGO_ENABLED=0 go build -trimpath -ldflags='-s -w' -o /fencerider ./cmd/fencerider \
 && mkdir -p /out/run/fencerider

FROM scratch
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build /fencerider /fencerider
COPY --from=build --chown=65532:65532 /out/run/fencerider /run/fencerider
USER 65532:65532
ENTRYPOINT ["/fencerider"]
CMD ["run"]
