package etcd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// The kinds of trouble. Every error of a Registry that comes from etcd wraps one of them.
var (
	// ErrUnauthorised says that etcd refuses who asks: the password is wrong, none was given, or the user
	// has no permission for the prefix.
	ErrUnauthorised = errors.New("not authorised")

	// ErrTimeout says that the server was silent for Config.Timeout.
	ErrTimeout = errors.New("the server is silent")

	// ErrNoLeader says that the server is up, but has no leader: it is cut off from the majority of its
	// cluster, or there is none.
	ErrNoLeader = errors.New("the cluster has no leader")

	// ErrUnreachable says that there is no connection: it cannot be made, or broke.
	ErrUnreachable = errors.New("the server cannot be reached")

	// ErrServer says that the server answered with another error.
	ErrServer = errors.New("the server answers with an error")

	// ErrClosed says that the Registry was closed.
	ErrClosed = errors.New("the registry is closed")
)

// kinds are in the order in which they are looked for.
var kinds = []error{ErrClosed, ErrUnauthorised, ErrTimeout, ErrNoLeader, ErrUnreachable, ErrServer}

// kindOf returns which of the kinds of trouble err is.
func kindOf(err error) error {
	for _, kind := range kinds {
		if errors.Is(err, kind) {
			return kind
		}
	}
	return ErrServer
}

// classify makes err, which a call to etcd returned, wrap its kind. ctx is that of the call; its own end
// is not for classify, unless it ended with one of the kinds as its cause.
func classify(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if cause := context.Cause(ctx); cause != nil {
		for _, kind := range kinds {
			if errors.Is(cause, kind) {
				return cause
			}
		}
	}
	for _, kind := range kinds {
		if errors.Is(err, kind) {
			return err
		}
	}
	err = rpctypes.Error(err)
	text, code := err.Error(), codes.Unknown
	var known rpctypes.EtcdError
	if errors.As(err, &known) {
		code = known.Code()
	} else if s, ok := status.FromError(err); ok {
		text, code = s.Message(), s.Code()
	}
	kind := ErrServer
	switch {
	case unauthorised(err) || code == codes.PermissionDenied || code == codes.Unauthenticated:
		kind = ErrUnauthorised
	case errors.Is(err, rpctypes.ErrNoLeader) || errors.Is(err, rpctypes.ErrLeaderChanged):
		kind = ErrNoLeader
	case code == codes.DeadlineExceeded || timedOut(err):
		kind = ErrTimeout
	case known == (rpctypes.EtcdError{}) && (code == codes.Unavailable || code == codes.Canceled):
		kind = ErrUnreachable
	case errors.Is(err, rpctypes.ErrStopped) || errors.Is(err, io.EOF):
		kind = ErrUnreachable
	}
	if text == kind.Error() {
		return kind
	}
	return &serverError{kind, text, err}
}

// timedOut reports whether err says that the server waited in vain for its cluster.
func timedOut(err error) bool {
	return errors.Is(err, rpctypes.ErrTimeout) || errors.Is(err, rpctypes.ErrTimeoutDueToLeaderFail) ||
		errors.Is(err, rpctypes.ErrTimeoutDueToConnectionLost)
}

// serverError is what etcd or gRPC said, and its kind.
type serverError struct {
	kind  error
	text  string
	cause error
}

func (e *serverError) Error() string   { return e.kind.Error() + ": " + e.text }
func (e *serverError) Unwrap() []error { return []error{e.kind, e.cause} }

// unauthorised reports whether err is one of etcd's about who asks. Some have the code InvalidArgument,
// and the reason why a watch was cancelled is a text only.
func unauthorised(err error) bool {
	for _, e := range []error{
		rpctypes.ErrPermissionDenied, rpctypes.ErrUserEmpty, rpctypes.ErrAuthFailed, rpctypes.ErrUserNotFound,
		rpctypes.ErrInvalidAuthToken, rpctypes.ErrInvalidAuthMgmt,
	} {
		if errors.Is(err, e) || strings.Contains(err.Error(), rpctypes.ErrorDesc(e)) {
			return true
		}
	}
	return stale(err)
}

// stale reports whether err says that the token has to be asked for anew.
func stale(err error) bool {
	for _, e := range []error{rpctypes.ErrInvalidAuthToken, rpctypes.ErrAuthOldRevision, rpctypes.ErrUserEmpty} {
		if errors.Is(rpctypes.Error(err), e) || strings.Contains(err.Error(), rpctypes.ErrorDesc(e)) {
			return true
		}
	}
	return false
}

// at names the endpoints that err is about.
func (s *settings) at(what string, err error) error {
	return fmt.Errorf("etcd: %s at %s: %w", what, s.urls(), err)
}
