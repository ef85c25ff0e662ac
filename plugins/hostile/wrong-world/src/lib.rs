//! A component of somebody else's world.

mod bindings {
    #![allow(missing_docs)] // generated

    wit_bindgen::generate!({
        inline: "
            package example:other;
            interface thing { answer: func() -> u32; }
            world other { export thing; }
        ",
    });
}

struct Exported;

impl bindings::exports::example::other::thing::Guest for Exported {
    fn answer() -> u32 {
        42
    }
}

bindings::export!(Exported with_types_in bindings);
