package proxy

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"go.uber.org/zap"
)

// listenUnix makes a socket with the given mode. A file that a dead process left
// is replaced; one behind which somebody answers is an error.
func listenUnix(path string, mode os.FileMode) (net.Listener, error) {
	if len(path) > 100 {
		return nil, fmt.Errorf("socket path %s is longer than 100 bytes, which the system does not take", path)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("make socket directory: %w", err)
	}
	if fi, err := os.Lstat(path); err == nil {
		if fi.Mode()&os.ModeSocket == 0 {
			return nil, fmt.Errorf("%s exists and is not a socket", path)
		}
		c, err := net.DialTimeout("unix", path, time.Second)
		if err == nil {
			_ = c.Close()
			return nil, fmt.Errorf("%s is in use by another process", path)
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			return nil, fmt.Errorf("look whether %s is in use: %w", path, err)
		}
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("remove stale socket: %w", err)
		}
	}
	// The socket is made closed to everybody and opened to the mode after that.
	old := syscall.Umask(0o177)
	ln, err := net.Listen("unix", path)
	syscall.Umask(old)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, mode); err != nil {
		_ = ln.Close()
		return nil, fmt.Errorf("set socket mode: %w", err)
	}
	return ln, nil
}

// guarded accepts only peers of this user or of root: a mode can be set wider
// than it was meant.
type guarded struct {
	net.Listener
	log *zap.Logger
}

// Accept implements [net.Listener].
func (g guarded) Accept() (net.Conn, error) {
	for {
		c, err := g.Listener.Accept()
		if err != nil {
			return nil, err
		}
		uid, err := peerUID(c)
		if err == nil && (uid == 0 || uid == os.Getuid()) {
			return c, nil
		}
		g.log.Warn("turned a process of another user away from a socket", zap.Int("uid", uid), zap.Error(err))
		_ = c.Close()
	}
}
