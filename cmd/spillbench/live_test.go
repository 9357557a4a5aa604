package main

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/observe/page"
)

// pipes is a listener whose connections are pipes: they are of a bubble, as its clock is.
type pipes struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	p.once.Do(func() { close(p.done) })
	return nil
}

func (p *pipes) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)} }

// dial returns the other end of a connection that is being served.
func (p *pipes) dial() net.Conn {
	ours, theirs := net.Pipe()
	p.conns <- theirs
	synctest.Wait()
	return ours
}

// TestSilentConnections: connections that ask for nothing, as browsers open them ahead, hold up no end.
// What is being answered is finished, unless the run is interrupted. The time is of a bubble's clock.
func TestSilentConnections(t *testing.T) {
	t.Parallel()
	for _, interrupted := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			at := &pipes{conns: make(chan net.Conn), done: make(chan struct{})}
			l := newLive(at, false)
			l.show(func() *page.Report { return &page.Report{Title: "the last one"} })
			silent, half, asking := at.dial(), at.dial(), at.dial()
			if _, err := io.WriteString(half, "GET / HTTP"); err != nil {
				t.Error(err)
			}
			if _, err := io.WriteString(asking, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"); err != nil {
				t.Error(err)
			}
			synctest.Wait() // until the answer is made, and waits for its reader
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if interrupted {
				cancel()
			}
			begin, closed := time.Now(), make(chan struct{})
			go func() {
				l.close(ctx)
				close(closed)
			}()
			synctest.Wait()
			for _, conn := range []net.Conn{silent, half} {
				if _, err := conn.Read(make([]byte, 1)); err != io.EOF {
					t.Errorf("interrupted %v: a silent connection ended with %v", interrupted, err)
				}
			}
			var text []byte
			answer, err := http.ReadResponse(bufio.NewReader(asking), nil)
			if err == nil {
				text, err = io.ReadAll(answer.Body)
			}
			if whole := err == nil && strings.Contains(string(text), "the last one"); whole == interrupted {
				t.Errorf("interrupted %v: the answer was %.100q, %v", interrupted, text, err)
			}
			<-closed
			if took := time.Since(begin); took > 100*time.Millisecond {
				t.Errorf("interrupted %v: took %v to close", interrupted, took)
			}
		})
	}
}
