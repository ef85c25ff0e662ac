;; Sleeps an hour, or exits with an error. sleeper.wasm is made of it: wasm-tools parse sleeper.wat -o sleeper.wasm
(component
  (import "wasi:io/poll@0.2.9" (instance $poll
      (export "pollable" (type $pollable (sub resource)))
      (export "[method]pollable.block" (func (param "self" (borrow $pollable))))))
  (alias export $poll "pollable" (type $pollable))
  (import "wasi:clocks/monotonic-clock@0.2.1" (instance $clock
      (export "pollable" (type $waiting (eq $pollable)))
      (export "now" (func (result u64)))
      (export "subscribe-duration" (func (param "when" u64) (result (own $waiting))))))
  (import "wasi:cli/exit@0.2.0" (instance $exit (export "exit" (func (param "status" (result))))))
  (core func $block (canon lower (func $poll "[method]pollable.block")))
  (core func $now (canon lower (func $clock "now")))
  (core func $subscribe (canon lower (func $clock "subscribe-duration")))
  (core func $exit (canon lower (func $exit "exit")))
  (core module $code
      (import "wasi" "block" (func $block (param i32)))
      (import "wasi" "now" (func $now (result i64)))
      (import "wasi" "subscribe" (func $subscribe (param i64) (result i32)))
      (import "wasi" "exit" (func $exit (param i32)))
      (func (export "sleep") (result i64)
          (call $block (call $subscribe (i64.const 3600000000000)))
          (call $now))
      (func (export "give-up") (call $exit (i32.const 1))))
  (core instance $running (instantiate $code (with "wasi" (instance
      (export "block" (func $block))
      (export "now" (func $now))
      (export "subscribe" (func $subscribe))
      (export "exit" (func $exit))))))
  (func (export "sleep") (result u64) (canon lift (core func $running "sleep")))
  (func (export "give-up") (canon lift (core func $running "give-up"))))
