package record

import (
	"errors"
	"fmt"
	"unicode/utf8"
)

// ErrVersion says that a record has a version newer than Version. It is always wrapped in a FieldError
// that has the version. The record may be quite right, and this program too old for it.
var ErrVersion = errors.New("newer record version")

// FieldError says what is wrong with a record, and where.
type FieldError struct {
	// Field is the path within the JSON object: "id", "endpoints[2]", `labels["site"]`. It is empty if
	// the data as a whole is at fault. Names that came with the data are quoted, and cut if long.
	Field string

	// Value is what was found, cut if long and as it came: it may have any characters. It is empty if
	// there is nothing to show, and always for the key: someone may have put a private one there.
	Value string

	Reason string // what is wrong, to be read after the field
	Err    error  // the cause, may be nil
}

// Error quotes the value.
func (e *FieldError) Error() string {
	s := "record"
	if e.Field != "" {
		s += ": " + e.Field
	}
	if e.Value != "" {
		s += fmt.Sprintf(" %q", e.Value)
	}
	return s + ": " + e.Reason
}

func (e *FieldError) Unwrap() error { return e.Err }

const maxValue = 64

func fieldError(field, value, reason string) *FieldError {
	return &FieldError{Field: field, Value: cut(value), Reason: reason}
}

func fieldErrorf(field, value, format string, args ...any) *FieldError {
	return fieldError(field, value, fmt.Sprintf(format, args...))
}

// cut bounds what an error repeats, and does not leave half a rune at the end.
func cut(s string) string {
	if len(s) <= maxValue {
		return s
	}
	n := maxValue
	for n > maxValue-utf8.UTFMax && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "..."
}
