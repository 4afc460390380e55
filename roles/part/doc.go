// Package part runs parts of a program that are to run for as long as it does: again and again, less often the more
// they fail, and never faster than somebody can look at.
//
// A [Runner] has one part, or several that share channels or connections and therefore begin and end together. It is a
// Service of suture, which owns the tree of all of them; but suture restarts at once, and when that is too often it
// pauses the whole tree. So a Runner never returns to it while it is to run, and restarts its parts by itself:
//
//	            starting ──> healthy        a part that ends, or whose probe keeps failing:
//	               ^            │             all parts are cancelled, and awaited
//	               │            v
//	Serve ──> (attempt) <── backing off     longer each time, with jitter, without an end;
//	               │                        short again only after an attempt that was healthy for a while
//	               v
//	           stopping ──> stopped         ctx ended: however the parts end then, it is no failure
//	           done                         all parts said that they are (ErrDone)
//
// A panic in a part is its error, with the stack, and so is one in what a [Group] started. A part that was cancelled
// and does not return is named ([State.Busy]); nothing is started in its place while it runs.
package part
