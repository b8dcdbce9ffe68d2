package audit

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
)

// FileOptions configure a file of events.
type FileOptions struct {
	Path string
	// MaxBytes is the length at which the file is put aside; 64 MiB.
	MaxBytes int64
	// Keep is how many files are kept aside; 10.
	Keep int
}

// fileSink appends lines to a file and syncs it after each batch.
type fileSink struct {
	opts FileOptions
	f    *os.File
	size int64
}

// OpenFile opens or makes a file of events, mode 0600.
func OpenFile(o FileOptions) (Sink, error) {
	if o.MaxBytes <= 0 {
		o.MaxBytes = 64 << 20
	}
	if o.Keep <= 0 {
		o.Keep = 10
	}
	s := &fileSink{opts: o}
	return s, s.open()
}

// open opens the file. A last line that was cut off by a crash is closed, so that
// the next event stands on a line of its own.
func (s *fileSink) open() error {
	f, err := os.OpenFile(s.opts.Path, os.O_RDWR|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("open audit file: %w", err)
	}
	fi, err := f.Stat()
	if err == nil && !fi.Mode().IsRegular() {
		err = errors.New("it is not a regular file")
	}
	if err == nil && fi.Mode().Perm()&0o077 != 0 {
		err = fmt.Errorf("its mode is %04o, want 0600: others can read it", fi.Mode().Perm())
	}
	if err == nil && fi.Size() > 0 {
		last := make([]byte, 1)
		if _, err = f.ReadAt(last, fi.Size()-1); err == nil && last[0] != '\n' {
			_, err = f.Write([]byte("\n"))
		}
	}
	if err != nil {
		_ = f.Close()
		return fmt.Errorf("open audit file %s: %w", s.opts.Path, err)
	}
	s.f, s.size = f, fi.Size()
	return nil
}

// Name implements [Sink].
func (s *fileSink) Name() string { return "file" }

// Write implements [Sink]. After a failure the file is opened anew, so that a
// disk which has room again is used again. Writing nothing still tries the disk.
func (s *fileSink) Write(lines [][]byte) (err error) {
	defer func() {
		if err != nil && s.f != nil {
			_ = s.f.Close()
			s.f = nil
		}
	}()
	if s.f == nil {
		if err := s.open(); err != nil {
			return err
		}
	}
	var b bytes.Buffer
	for _, l := range lines {
		b.Write(l)
		b.WriteByte('\n')
	}
	if b.Len() == 0 {
		// A full disk opens files gladly; only a write that is synced tells.
		b.WriteByte('\n')
	}
	if s.size > 0 && s.size+int64(b.Len()) > s.opts.MaxBytes {
		if err := s.rotate(); err != nil {
			return fmt.Errorf("rotate audit file: %w", err)
		}
	}
	n, err := s.f.Write(b.Bytes())
	s.size += int64(n)
	if err != nil {
		return fmt.Errorf("write audit file: %w", err)
	}
	if err := s.f.Sync(); err != nil {
		return fmt.Errorf("sync audit file: %w", err)
	}
	return nil
}

// rotate puts the file aside and begins a new one. Everything in it is synced.
func (s *fileSink) rotate() error {
	err := s.f.Close()
	s.f = nil
	if err != nil {
		return err
	}
	name := func(i int) string { return s.opts.Path + "." + strconv.Itoa(i) }
	for i := s.opts.Keep - 1; i >= 1; i-- {
		if err := os.Rename(name(i), name(i+1)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	if err := os.Rename(s.opts.Path, name(1)); err != nil {
		return err
	}
	if err := s.open(); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(s.opts.Path))
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	return dir.Sync()
}

// Close implements [Sink].
func (s *fileSink) Close() error {
	if s.f == nil {
		return nil
	}
	return errors.Join(s.f.Sync(), s.f.Close())
}
