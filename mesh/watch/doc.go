// Package watch holds one value that changes, for readers who want the newest and not the history.
//
// An event queue between a fast writer and a slow reader either grows or blocks. Here is neither: a
// reader takes the value together with a channel that closes once there is a newer one, works with
// the value for as long as it needs, and looks again. Whatever came in between is skipped.
//
//	for {
//		view, ok, stale := v.Get()
//		if ok {
//			use(view)
//		}
//		select {
//		case <-stale:
//		case <-ctx.Done():
//			return
//		}
//	}
package watch
