package proxy

import (
	"errors"
	"net"

	"golang.org/x/sys/unix"
)

// peerUID returns the user at the other end of a unix socket.
func peerUID(c net.Conn) (int, error) {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return -1, errors.New("not a unix socket")
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return -1, err
	}
	uid := -1
	var inner error
	err = raw.Control(func(fd uintptr) {
		cred, e := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		if e != nil {
			inner = e
			return
		}
		uid = int(cred.Uid)
	})
	return uid, errors.Join(err, inner)
}
