//go:build !linux

package proxy

import (
	"net"
	"os"
)

// peerUID trusts the socket's mode where the system tells no more.
func peerUID(net.Conn) (int, error) { return os.Getuid(), nil }
